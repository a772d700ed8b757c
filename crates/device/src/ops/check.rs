//! Checks that every request makes once.

use crate::{DType, Error, Op, Site, View, op::Launch, ops::Kernel};

/// A view with the name its kernel gives it.
pub(crate) type Named<'a> = (&'static str, &'a View);

/// Names an operation in the errors of its checks.
pub(crate) struct Check {
    op: &'static str,
    site: Site,
}

impl Check {
    pub(crate) fn new(op: &'static str, site: impl Into<Site>) -> Check {
        Check { op, site: site.into() }
    }

    /// The checked operation.
    #[inline]
    pub(crate) fn launch(self, accesses: Vec<crate::Access>, kernel: Kernel) -> Op {
        Op::new(self.op, self.site, accesses, Launch::Kernel(kernel))
    }

    pub(crate) fn dtype(&self, need: DType, tensors: &[Named<'_>]) -> Result<(), Error> {
        match tensors.iter().find(|(_, v)| v.dtype() != need) {
            None => Ok(()),
            Some((tensor, v)) => Err(self.element_type(tensor, v, need)),
        }
    }

    /// f32 or bf16.
    pub(crate) fn real(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        match tensors.iter().find(|(_, v)| v.dtype().is_whole()) {
            None => Ok(()),
            Some((tensor, v)) => Err(self.element_type(tensor, v, DType::F32)),
        }
    }

    /// Values and their gradients: f32 or bf16, all as the first.
    pub(crate) fn values(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        self.real(&tensors[..1])?;
        self.dtype(tensors[0].1.dtype(), tensors)
    }

    fn element_type(&self, tensor: &'static str, view: &View, need: DType) -> Error {
        Error::ElementType { op: self.op, site: self.site.as_str().into(), tensor, have: view.dtype(), need }
    }

    pub(crate) fn shapes(
        &self,
        holds: bool,
        left: Named<'_>,
        right: Named<'_>,
        rule: &'static str,
    ) -> Result<(), Error> {
        if holds {
            return Ok(());
        }
        Err(Error::Shapes {
            op: self.op,
            site: self.site.as_str().into(),
            left: left.0,
            left_shape: left.1.shape().to_vec(),
            right: right.0,
            right_shape: right.1.shape().to_vec(),
            rule,
        })
    }

    /// As matrices, all have the sizes of the first.
    pub(crate) fn same_sizes(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        let first = tensors[0];
        tensors[1..].iter().try_for_each(|&t| {
            let holds = t.1.row_count() == first.1.row_count() && t.1.cols() == first.1.cols();
            self.shapes(holds, first, t, "both must have the same rows and columns")
        })
    }

    /// Vectors with one entry for each column of a matrix.
    pub(crate) fn per_column(&self, matrix: Named<'_>, vectors: &[Named<'_>]) -> Result<(), Error> {
        vectors.iter().try_for_each(|&v| {
            let holds = v.1.row_count() == 1 && v.1.cols() == matrix.1.cols();
            self.shapes(holds, matrix, v, "the second must be a vector with one entry for each column of the first")
        })
    }

    /// Contiguous vectors with one entry for each row of a matrix.
    pub(crate) fn per_row(&self, matrix: Named<'_>, vectors: &[Named<'_>]) -> Result<(), Error> {
        vectors.iter().try_for_each(|&v| {
            let holds = v.1.numel() == matrix.1.row_count();
            self.shapes(holds, matrix, v, "the second must have one entry for each row of the first")?;
            self.contiguous(&[v])
        })
    }

    /// f32 scalars: views of one element.
    pub(crate) fn scalars(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        self.dtype(DType::F32, tensors)?;
        self.single(tensors)
    }

    /// Views of one element.
    pub(crate) fn single(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        tensors.iter().try_for_each(|&t| self.shapes(t.1.numel() == 1, t, t, "it must have exactly one element"))
    }

    pub(crate) fn contiguous(&self, tensors: &[Named<'_>]) -> Result<(), Error> {
        match tensors.iter().find(|(_, v)| !v.is_contiguous()) {
            None => Ok(()),
            Some((_, v)) => Err(Error::Strided { label: v.label().into(), shape: v.shape().to_vec() }),
        }
    }

    pub(crate) fn setting(
        &self,
        holds: bool,
        setting: &'static str,
        value: f64,
        rule: &'static str,
    ) -> Result<(), Error> {
        if holds {
            Ok(())
        } else {
            Err(Error::Setting { op: self.op, site: self.site.as_str().into(), setting, value, rule })
        }
    }

    /// Rows come in sequences of `seq_len`.
    pub(crate) fn sequences(&self, tensor: Named<'_>, seq_len: usize) -> Result<(), Error> {
        self.setting(
            seq_len > 0 && tensor.1.row_count().is_multiple_of(seq_len),
            "seq_len",
            seq_len as f64,
            "it must divide the number of rows",
        )
    }
}
