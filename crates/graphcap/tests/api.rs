//! The one test binary of this crate.

mod api {
    mod claims; //    each kind of finding, once with and once without the mistake
    mod files; //     traces written and read back
    mod machines; //  programs on simulated machines: verdicts against results
    mod oracle; //    random traces against reachability, counted out
    mod shrinking; // smallest failing cases
    mod traces; //    traces made by hand
}
