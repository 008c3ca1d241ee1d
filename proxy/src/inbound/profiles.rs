//! ServiceProfiles of the names in requests to the application: the metrics `route_*` of the server's side, and classes
//! of responses.
//!
//! ```text
//! l5d-dst-canonical | :authority | Host -> name under a suffix -> Destination.GetProfile -> route -> metrics, classes
//! ```
//!
//! Owns how many names are looked up and for how long. Refuses to change what becomes of a request: a profile's retries
//! and timeouts are its client's.

use std::{
    num::NonZeroU16,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ::http::{HeaderValue, Request, header::HOST};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::{
    destination::{Destination, Name},
    discover::{
        Discover, ProfileLookup,
        profile::{Profile, ProfileState},
    },
    http::headers::DST_CANONICAL,
    metrics::HttpMetrics,
    recent::Recent,
    request::classify::Classes,
    shared::Shared,
};

/// The most names whose profiles are followed, per worker. Clients choose names, and each is a stream of the control
/// plane; requests for others have no route.
const MAX_NAMES: usize = 64;
/// How long a name stays for which there would be no room otherwise, so that clients that change names cost the control
/// plane no more than [`MAX_NAMES`] questions in that time.
const LEAST_STAY: Duration = Duration::from_secs(1);
/// The port of names without one.
const HTTP: NonZeroU16 = NonZeroU16::new(80).unwrap();

/// One worker's profiles by name.
pub(super) struct Profiles {
    shared: Arc<Shared>,
    discover: Discover,
    names: Recent<Name, NamedProfile>,
}

/// The profile of one name.
pub(super) struct NamedProfile {
    lookup: Arc<ProfileLookup>,
    port: u16,
    /// Until when requests wait for the first answer.
    answered_by: Instant,
    routes: Mutex<Option<Arc<CountedRoutes>>>,
}

/// A profile's routes, and what is counted of each that was used.
struct CountedRoutes {
    profile: Arc<Profile>,
    dst: String,
    metrics: Vec<OnceLock<Arc<HttpMetrics>>>,
}

/// The profile that the last request of a connection named: mostly, all of them name the same.
#[derive(Default)]
pub(super) struct LastNamed(Mutex<Option<(HeaderValue, Option<Arc<NamedProfile>>)>>);

/// The route of a request.
pub(super) struct ProfileRoute {
    /// What is counted.
    pub(super) metrics: Arc<HttpMetrics>,
    /// Which responses are failures.
    pub(super) classes: Classes,
}

impl Profiles {
    pub(super) fn new(shared: Arc<Shared>, discover: Discover) -> Self {
        Self { shared, discover, names: Recent::new() }
    }

    /// The route of a request to this name.
    pub(super) fn route<B>(&self, named: &NamedProfile, request: &Request<B>) -> Option<ProfileRoute> {
        named.routes()?.route(&self.shared, request)
    }

    /// The profile of the name in a request, which may not be known yet.
    pub(super) fn named_by<B>(&self, last: &LastNamed, request: &Request<B>) -> Option<Arc<NamedProfile>> {
        let authority;
        let value = match request.headers().get(DST_CANONICAL) {
            Some(value) => value,
            None => match request.uri().authority() {
                Some(of_uri) => {
                    authority = HeaderValue::from_str(of_uri.as_str()).ok()?;
                    &authority
                }
                None => request.headers().get(HOST)?,
            },
        };
        let mut last = last.0.lock();
        if let Some((known, named)) = &*last
            && known == value
        {
            return named.clone();
        }
        let named = value.to_str().ok().and_then(|name| self.look_up(name));
        *last = Some((value.clone(), named.clone()));
        named
    }

    /// The profile of a name, if it has a suffix of the settings. If [`MAX_NAMES`] are followed, the one that was
    /// unused for the longest time is forgotten for it, but none before [`LEAST_STAY`].
    fn look_up(&self, name: &str) -> Option<Arc<NamedProfile>> {
        let config = &self.shared.config.destination;
        let name = Name::parse(name, HTTP).filter(|name| config.suffixes.iter().any(|suffix| suffix.covers(name)))?;
        self.names.get_within(MAX_NAMES, LEAST_STAY, &name, || {
            let destination = Destination::Name(name.clone());
            NamedProfile {
                port: destination.port(),
                lookup: self.discover.profile(&destination),
                answered_by: Instant::now() + config.initial_timeout,
                routes: Mutex::default(),
            }
        })
    }

    /// Forgets names that no request has had for a while.
    pub(super) fn sweep(&self) {
        self.names.sweep(Instant::now(), self.shared.config.inbound.discovery_idle_timeout);
    }

    /// The names that are followed.
    #[cfg(test)]
    pub(super) fn known_names(&self) -> Vec<String> {
        self.names.keys().iter().map(ToString::to_string).collect()
    }
}

impl NamedProfile {
    /// Waits for the first answer about the name, as long as the settings say.
    pub(super) async fn answered(&self) {
        if matches!(&*self.lookup.profile.borrow(), ProfileState::Pending) && Instant::now() < self.answered_by {
            let mut state = self.lookup.profile.clone();
            let answered = async move { state.wait_for(|state| !matches!(state, ProfileState::Pending)).await.is_ok() };
            // Boxed, because nearly no request waits. What the answer is, is read afterwards.
            let _answered = Box::pin(timeout_at(self.answered_by, answered)).await;
        }
    }

    /// The routes of the last answer, if it is about a service.
    fn routes(&self) -> Option<Arc<CountedRoutes>> {
        let state = self.lookup.profile.borrow();
        let ProfileState::Known(profile) = &*state else { return None };
        let name = profile.name.as_ref()?;
        let mut routes = self.routes.lock();
        match &*routes {
            Some(known) if Arc::ptr_eq(&known.profile, profile) => Some(Arc::clone(known)),
            _ => {
                let metrics = (0..profile.number_of_routes()).map(|_| OnceLock::new()).collect();
                let dst = format!("{name}:{}", self.port);
                let current = Arc::new(CountedRoutes { profile: Arc::clone(profile), dst, metrics });
                *routes = Some(Arc::clone(&current));
                Some(current)
            }
        }
    }
}

impl CountedRoutes {
    fn route<B>(&self, shared: &Shared, request: &Request<B>) -> Option<ProfileRoute> {
        let (index, route) = self.profile.route(request)?;
        let look_up = || Arc::new(shared.metrics.inbound_profile_route(&self.dst, route.labels));
        let metrics = self.metrics.get(index)?.get_or_init(look_up);
        Some(ProfileRoute { metrics: Arc::clone(metrics), classes: route.classes.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbound::testing::{self, Mesh};

    #[tokio::test(start_paused = true)]
    async fn clients_that_change_names_do_not_make_the_control_plane_answer_each() {
        let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
        let profiles = Profiles::new(Arc::clone(&shared), testing::discover(&shared));
        let host = |number| format!("name-{number}.demo.svc.cluster.local");
        assert!((0..MAX_NAMES).all(|number| profiles.look_up(&host(number)).is_some()));
        assert!(profiles.look_up(&host(MAX_NAMES)).is_none(), "all came only just");
        let _in_use = profiles.look_up(&host(0));
        tokio::time::advance(LEAST_STAY).await;
        assert!(profiles.look_up(&host(MAX_NAMES)).is_some());
        let known = profiles.known_names();
        let knows = |number| known.contains(&format!("{}:80", host(number)));
        assert!(known.len() == MAX_NAMES && knows(0) && knows(MAX_NAMES), "{known:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn names_that_no_request_has_are_forgotten_after_the_idle_time() {
        let (shared, _drain) = testing::shared(testing::config(), &Mesh::new());
        let profiles = Profiles::new(Arc::clone(&shared), testing::discover(&shared));
        let idle = shared.config.inbound.discovery_idle_timeout;
        assert_eq!(idle, Duration::from_secs(90));
        let (unused, asked, in_use) =
            ("unused.demo.svc.cluster.local", "asked.demo.svc.cluster.local", "used.demo.svc.cluster.local");
        let _in_use = profiles.look_up(in_use);
        assert!([unused, asked].into_iter().all(|name| profiles.look_up(name).is_some()));
        let known = || {
            profiles.sweep();
            let mut names = profiles.known_names();
            names.sort_unstable();
            names
        };
        let named = |names: &[&str]| names.iter().map(|name| format!("{name}:80")).collect::<Vec<_>>();
        tokio::time::advance(idle - Duration::from_secs(1)).await;
        assert!(profiles.look_up(asked).is_some());
        assert_eq!(known(), named(&[asked, unused, in_use]));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(known(), named(&[asked, in_use]));
        tokio::time::advance(idle).await;
        assert_eq!(known(), named(&[in_use]));
    }
}
