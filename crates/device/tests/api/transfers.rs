//! Values on their way to the device and back.

use device::*;

use super::{
    drivers::{Driver, LIMIT, dry},
    work::{floats, open, set},
};

conformance! {
    every:
        an_upload_of_the_wrong_size_or_type_is_refused,
        only_memory_of_a_card_has_an_address_there;
    computing:
        a_download_has_the_values_of_its_place_in_the_stream,
        columns_are_transferred_without_their_neighbours,
        every_element_type_survives_the_way,
        empty_views_are_transferred,
        a_download_can_be_dropped,
        fresh_memory_is_what_the_options_say
}

fn a_download_has_the_values_of_its_place_in_the_stream(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 2);
    let downloads: Vec<Download<f32>> = (0..10)
        .map(|i| {
            stream.launch(set(&v, i as f32)).unwrap();
            stream.download(&v).unwrap()
        })
        .collect();
    for (i, download) in downloads.into_iter().enumerate().rev() {
        assert_eq!(download.wait().unwrap(), [i as f32; 2]);
    }
}

fn only_memory_of_a_card_has_an_address_there(driver: &Driver) {
    let machine = driver.machine();
    let (device, _stream) = open(&machine, 0, "compute");
    let v = floats(&device, "v", 4);
    match [&v, &v.flat(1..4).unwrap()].map(View::card_address) {
        [Some(first), Some(second)] => assert_eq!((machine.driver(), second - first), ("cuda", 4)),
        addresses => {
            assert_eq!(addresses, [None, None]);
            assert_ne!(machine.driver(), "cuda");
        }
    }
}

fn columns_are_transferred_without_their_neighbours(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let m = device.alloc("m", &[3, 5], DType::I32, MemoryKind::Other).unwrap();
    stream.upload(&m, (0..15).collect::<Vec<i32>>()).unwrap();
    let middle = m.columns(1..3).unwrap();
    let before = stream.download::<i32>(&middle).unwrap();
    stream.upload(&middle, vec![-1, -2, -3, -4, -5, -6]).unwrap();
    assert_eq!(before.wait().unwrap(), [1, 2, 6, 7, 11, 12]);
    let all = stream.download::<i32>(&m).unwrap().wait().unwrap();
    assert_eq!(all, [0, -1, -2, 3, 4, 5, -3, -4, 8, 9, 10, -5, -6, 13, 14]);
}

fn every_element_type_survives_the_way(driver: &Driver) {
    fn there_and_back<T: Element>(stream: &Stream, values: Vec<T>) {
        let view = stream.device().alloc("v", &[values.len()], T::DTYPE, MemoryKind::Other).unwrap();
        stream.upload(&view, values.clone()).unwrap();
        assert_eq!(stream.download::<T>(&view).unwrap().wait().unwrap(), values);
    }
    let (_device, stream) = open(&driver.machine(), 0, "compute");
    there_and_back(&stream, vec![1.5f32, -0.0, f32::INFINITY, f32::MIN_POSITIVE / 2.0]);
    there_and_back(&stream, vec![i32::MIN, -1, 0, i32::MAX]);
    there_and_back(&stream, [1.5, -3.0, 1e30].map(bf16::from_f32).to_vec());
}

fn empty_views_are_transferred(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    for dims in [&[0][..], &[0, 4], &[4, 0]] {
        let v = device.alloc("none", dims, DType::F32, MemoryKind::Other).unwrap();
        stream.upload::<f32>(&v, Vec::new()).unwrap();
        assert_eq!(stream.download::<f32>(&v).unwrap().wait().unwrap(), [0f32; 0]);
    }
}

fn a_download_can_be_dropped(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = floats(&device, "v", 2);
    stream.launch(set(&v, 3.0)).unwrap();
    drop(stream.download::<f32>(&v).unwrap());
    assert_eq!(stream.download::<f32>(&v).unwrap().wait().unwrap(), [3.0; 2]);
}

fn fresh_memory_is_what_the_options_say(driver: &Driver) {
    let (device, stream) = open(&driver.limited(LIMIT), 0, "compute");
    let f = floats(&device, "f", 3);
    let i = device.alloc("i", &[3], DType::I32, MemoryKind::Other).unwrap();
    assert!(stream.download::<f32>(&f).unwrap().wait().unwrap().iter().all(|x| x.is_nan()));
    assert_eq!(stream.download::<i32>(&i).unwrap().wait().unwrap(), [-1; 3]);
}

fn an_upload_of_the_wrong_size_or_type_is_refused(driver: &Driver) {
    let (device, stream) = open(&driver.machine(), 0, "compute");
    let v = device.alloc("wte", &[2, 3], DType::F32, MemoryKind::Param).unwrap();
    let size = stream.upload(&v, vec![0f32; 5]).unwrap_err();
    assert_eq!(size.to_string(), "upload@wte: view is [2, 3] and values is [5]; as many values as elements");
    let kind = stream.upload(&v, vec![0i32; 6]).unwrap_err();
    assert_eq!(kind.to_string(), "upload@wte: view is f32, needs i32");
    assert!(matches!(stream.download::<i32>(&v), Err(Error::ElementType { .. })));
    stream.synchronize().unwrap();
}

#[test]
fn the_dry_driver_says_that_it_has_no_values() {
    let (device, stream) = open(&dry().machine(), 0, "compute");
    let v = floats(&device, "wte", 2);
    stream.upload(&v, vec![1f32, 2.0]).unwrap();
    let error = stream.download::<f32>(&v).err().unwrap();
    assert_eq!(error.to_string(), "'wte' has no values: the dry driver keeps shapes only");
}
