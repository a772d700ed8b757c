//! The one test binary of this crate.

mod api {
    mod oracle; // random traces against reachability, counted out
    mod traces; // traces made by hand
}
