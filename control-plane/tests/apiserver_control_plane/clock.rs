//! A wall clock that is set forward and back while processes of the control plane run, as NTP does on a machine that
//! slept. libfaketime moves `CLOCK_REALTIME` of the real programs, and nothing else.

use std::{fs, path::PathBuf};

use weft_proto::linkerd::identity::CertifyResponse;

use crate::{process::Clock, world::World};

/// Seconds; a part of a certificate's lifetime.
const HOUR: i64 = 3600;

#[tokio::test]
async fn a_clock_step_neither_moves_the_lease_nor_stops_certificates() {
    let world = World::new().await;
    let clock = Clock::new(world.directory());
    let holder = world.destination_at("stepped", &clock).await;
    world.holder("stepped").await;
    let other = world.destination("other", None).await;
    let (certificates, name) = (world.certificates(), world.identity_of("web"));
    world.service_account("web").await;
    let identity = world.identity_at(&certificates, &clock);
    let token = world.token("web", "identity.l5d.io").await;
    identity.ready().await;
    holder.ready().await;
    other.ready().await;
    let certify = async || world.certify(&identity, &name, &token).await.map(|issued| expiry(&issued));
    let before = certify().await.unwrap();

    // Forward, and back again. Certificates follow the clock.
    for seconds in [HOUR, 0] {
        clock.set(seconds);
        world.renewal().await;
        world.renewal().await;
        assert_eq!(world.lease_holder().await.as_deref(), Some("stepped"), "{seconds} s");
        let moved = certify().await.unwrap() - before;
        assert!((moved - seconds).abs() < HOUR / 2, "a certificate ends {moved} s later, of {seconds}");
    }
    assert!(holder.lines("lost lease").is_empty() && other.lines("acquired lease").is_empty());

    // Far beyond the issuer's own end nothing is issued, and once the clock is right, everything is.
    clock.set(100 * 365 * 24 * HOUR);
    certify().await.unwrap_err();
    clock.set(0);
    certify().await.unwrap();
    world.done().await;
}

/// Seconds since the epoch at which a certificate ends.
fn expiry(issued: &CertifyResponse) -> i64 {
    issued.valid_until.as_ref().unwrap().seconds
}

impl Clock {
    /// A clock that is right.
    fn new(directory: &std::path::Path) -> Self {
        let clock = Self { offset: directory.join("clock"), library: library() };
        clock.set(0);
        clock
    }

    /// Sets the clock `seconds` off the machine's.
    fn set(&self, seconds: i64) {
        let new = self.offset.with_extension("new");
        fs::write(&new, format!("{seconds:+}")).unwrap();
        fs::rename(&new, &self.offset).unwrap();
    }
}

/// libfaketime, in the directory of this machine's libraries.
fn library() -> PathBuf {
    let directories = fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let mut libraries = directories.map(|directory| directory.join("faketime/libfaketime.so.1"));
    libraries
        .find(|library| library.exists())
        .expect("libfaketime, which `cargo xtask setup` installs (package faketime)")
}
