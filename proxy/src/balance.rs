//! Balancing.
