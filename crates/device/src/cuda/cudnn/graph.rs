//! A graph of operations that the library runs as one, and its plan.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Name, cudnnBackendDescriptorType_t as Kind, cudnnBackendHeurMode_t as Mode,
    cudnnDataType_t as Number, cudnnPointwiseMode_t as Pointwise, cudnnReduceTensorOp_t as Reduction,
};

use super::{
    calls::{Calls, RawHandle},
    descriptor::{Descriptor, Opened, Part},
};
use crate::cuda::{CudaError, fused::Port};

/// Operations and tensors, in the order in which they were named.
pub(super) struct Graph {
    calls: Arc<Calls>,
    tensors: Vec<Descriptor>,
    /// What operations do, apart from what they do it to.
    settings: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    ports: Vec<Port>,
}

/// One of a graph's tensors.
#[derive(Clone, Copy)]
pub(super) struct Tensor {
    at: usize,
    pub(super) layout: Layout,
}

/// Sizes, and elements from one index to the next: batch, head, row, column.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) sizes: [i64; 4],
    pub(super) strides: [i64; 4],
}

/// How a graph runs, with all that it is made of.
pub(super) struct GraphPlan {
    pub(super) plan: Descriptor,
    pub(super) ports: Vec<Port>,
    /// Bytes that the library works in.
    pub(super) workspace: usize,
    _parts: (Graph, [Descriptor; 2], Descriptor),
}

/// Ways to run a graph that are tried, at most: the library's first choices.
const TRIED: usize = 8;
/// What addresses are multiples of.
const ALIGNMENT: i64 = 16;

impl Layout {
    /// Without gaps.
    pub(super) fn packed(sizes: [i64; 4]) -> Layout {
        let [_, heads, rows, cols] = sizes;
        Layout { sizes, strides: [heads * rows * cols, rows * cols, cols, 1] }
    }

    /// Rows as columns and columns as rows, of the same memory.
    pub(super) fn turned(self) -> Layout {
        let turn = |[batch, head, row, col]: [i64; 4]| [batch, head, col, row];
        Layout { sizes: turn(self.sizes), strides: turn(self.strides) }
    }
}

/// The name of a port's tensor; tensors without memory have those from [`NAMELESS`] on.
pub(super) fn name(port: Port) -> i64 {
    port as i64 + 1
}

const NAMELESS: i64 = 1000;

impl Graph {
    pub(super) fn new(calls: &Arc<Calls>) -> Graph {
        let none = Vec::new;
        Graph { calls: calls.clone(), tensors: none(), settings: none(), operations: none(), ports: Vec::new() }
    }

    /// A tensor in memory.
    pub(super) fn memory(&mut self, port: Port, layout: Layout, number: Number) -> Result<Tensor, CudaError> {
        self.ports.push(port);
        self.tensor(name(port), layout, number, Ok)
    }

    /// A number that is passed with each launch.
    pub(super) fn value(&mut self, port: Port) -> Result<Tensor, CudaError> {
        self.ports.push(port);
        let layout = Layout::packed([1; 4]);
        let by_value = |tensor: Descriptor| tensor.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true]);
        self.tensor(name(port), layout, Number::CUDNN_DATA_FLOAT, by_value)
    }

    /// What one operation hands to another.
    pub(super) fn between(&mut self, layout: Layout, number: Number) -> Result<Tensor, CudaError> {
        let is_virtual = |tensor: Descriptor| tensor.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true]);
        self.tensor(NAMELESS + self.tensors.len() as i64, layout, number, is_virtual)
    }

    fn tensor(
        &mut self,
        name: i64,
        layout: Layout,
        number: Number,
        more: impl FnOnce(Descriptor) -> Result<Descriptor, CudaError>,
    ) -> Result<Tensor, CudaError> {
        let tensor = Descriptor::new(&self.calls, Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[name])?
            .set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[number])?
            .set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.sizes)?
            .set(Name::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?
            .set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?;
        self.tensors.push(more(tensor)?.finalize()?);
        Ok(Tensor { at: self.tensors.len() - 1, layout })
    }

    fn part(&self, tensor: Tensor) -> Part {
        self.tensors[tensor.at].part()
    }

    fn operation(
        &mut self,
        kind: Kind,
        setting: Option<(Name, Descriptor)>,
        tensors: &[(Name, Tensor)],
    ) -> Result<(), CudaError> {
        let mut operation = Descriptor::new(&self.calls, kind)?;
        if let Some((name, setting)) = setting {
            operation = operation.set(name, &[setting.part()])?;
            self.settings.push(setting);
        }
        for (name, tensor) in tensors {
            operation = operation.set(*name, &[self.part(*tensor)])?;
        }
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// c = a·b.
    pub(super) fn product(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<Tensor, CudaError> {
        let setting = Descriptor::new(&self.calls, Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Number::CUDNN_DATA_FLOAT])?
            .finalize()?;
        let tensors = [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
        ];
        let setting = Some((Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, setting));
        self.operation(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, setting, &tensors)?;
        Ok(c)
    }

    /// `x` along the dimensions in which `y` has size 1.
    pub(super) fn reduce(&mut self, how: Reduction, x: Tensor, y: Tensor) -> Result<Tensor, CudaError> {
        let setting = Descriptor::new(&self.calls, Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[how])?
            .set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Number::CUDNN_DATA_FLOAT])?
            .finalize()?;
        let tensors =
            [(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x), (Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y)];
        let setting = Some((Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, setting));
        self.operation(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, setting, &tensors)?;
        Ok(y)
    }

    /// The same elements as `x`, read as `y` is laid out.
    pub(super) fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<Tensor, CudaError> {
        let tensors = [(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x), (Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y)];
        self.operation(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, None, &tensors)?;
        Ok(y)
    }

    /// One element from those of up to three inputs.
    pub(super) fn pointwise(&mut self, how: Pointwise, inputs: &[Tensor], y: Tensor) -> Result<Tensor, CudaError> {
        self.pointwise_in(Number::CUDNN_DATA_FLOAT, how, None, inputs, y)
    }

    /// The same, into a tensor of f32 as the first input is laid out.
    pub(super) fn map(&mut self, how: Pointwise, inputs: &[Tensor]) -> Result<Tensor, CudaError> {
        let y = self.between(inputs[0].layout, Number::CUDNN_DATA_FLOAT)?;
        self.pointwise(how, inputs, y)
    }

    /// Scores, with minus infinity for keys behind their query.
    pub(super) fn causal(&mut self, scores: Tensor) -> Result<Tensor, CudaError> {
        let mut index = |axis| {
            let y = self.between(scores.layout, Number::CUDNN_DATA_INT32)?;
            let how = Pointwise::CUDNN_POINTWISE_GEN_INDEX;
            self.pointwise_in(Number::CUDNN_DATA_FLOAT, how, Some(axis), &[scores], y)
        };
        let (row, col) = (index(2)?, index(3)?);
        let seen = self.between(scores.layout, Number::CUDNN_DATA_BOOLEAN)?;
        let how = Pointwise::CUDNN_POINTWISE_CMP_GE;
        self.pointwise_in(Number::CUDNN_DATA_BOOLEAN, how, None, &[row, col], seen)?;
        let minus_infinity = self.value(Port::MinusInfinity)?;
        self.map(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, &[scores, minus_infinity, seen])
    }

    fn pointwise_in(
        &mut self,
        precision: Number,
        how: Pointwise,
        axis: Option<i64>,
        inputs: &[Tensor],
        y: Tensor,
    ) -> Result<Tensor, CudaError> {
        let mut setting = Descriptor::new(&self.calls, Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_POINTWISE_MODE, &[how])?
            .set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            setting = setting.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let inputs = names.into_iter().zip(inputs.iter().copied());
        let tensors: Vec<_> = inputs.chain([(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)]).collect();
        let setting = Some((Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, setting.finalize()?));
        self.operation(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, setting, &tensors)?;
        Ok(y)
    }

    /// The first way to run it, in the library's order, that this card can; none if there is no such.
    pub(super) fn plan(self, handle: RawHandle) -> Result<Option<GraphPlan>, CudaError> {
        let calls = self.calls.clone();
        let operations: Vec<Part> = self.operations.iter().map(Descriptor::part).collect();
        let graph = Descriptor::new(&calls, Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[Opened(handle)])?
            .set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?
            .finalize()?;
        let choice = Descriptor::new(&calls, Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .set(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph.part()])?
            .set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[Mode::CUDNN_HEUR_MODE_A])?
            .finalize()?;
        let empty = (0..TRIED).map(|_| Descriptor::new(&calls, Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        let ways = choice.fill(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, empty.collect::<Result<_, _>>()?)?;
        let mut refused = None;
        for way in ways {
            let plan = Descriptor::new(&calls, Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
                .set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[Opened(handle)])?
                .set(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[way.part()])?
                .finalize();
            match plan {
                Ok(plan) => {
                    let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)? as usize;
                    let ports = self.ports.clone();
                    return Ok(Some(GraphPlan { plan, ports, workspace, _parts: (self, [graph, choice], way) }));
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        refused.map_or(Ok(None), Err)
    }
}
