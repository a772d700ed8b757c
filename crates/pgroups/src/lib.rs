//! Process groups without globals: grids, groups, collectives, parameters and where they lie.
