//! One mesh for all tests of a file: started by the first test, stopped when the last one has finished.

use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use tokio::runtime::Runtime;

use super::{Mesh, Options, unique_name};
use crate::manifests::Manifests;

/// A mesh outlives the test that started it, so it uses a runtime that outlives all tests.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.unwrap_or_else(|error| panic!("no runtime for the tests: {error}"))
});

/// A mesh that tests share. Tests that change the mesh need their own.
pub struct Shared {
    running: Mutex<Weak<Running>>,
    start: fn() -> (Manifests, Options),
}

struct Running {
    mesh: Option<Mesh>,
}

/// The result of [`Shared::keep`].
pub struct Kept {
    _running: Option<Arc<Running>>,
}

impl Shared {
    /// The example mesh.
    pub const fn example() -> Self {
        Self::with(|| {
            let manifests = Manifests::example().unwrap_or_else(|error| panic!("write the example manifests: {error}"));
            (manifests, Options { name: unique_name("t-mesh"), ..Options::default() })
        })
    }

    /// A mesh of these manifests and options.
    pub const fn with(start: fn() -> (Manifests, Options)) -> Self {
        Self { running: Mutex::new(Weak::new()), start }
    }

    /// Runs a test with the mesh.
    ///
    /// # Panics
    /// When the mesh does not start or the test fails.
    pub fn test(&self, test: impl AsyncFnOnce(&Mesh)) {
        let running = self.acquire();
        let mesh = running.mesh.as_ref().unwrap_or_else(|| unreachable!("only dropping takes it away"));
        RUNTIME.block_on(test(mesh));
    }

    /// Keeps the mesh, if it is running, until the result is dropped. For a test with a mesh of its own: while it takes
    /// a thread, the other tests may run one at a time, and each would start the mesh again.
    #[must_use]
    pub fn keep(&self) -> Kept {
        Kept { _running: self.running.lock().unwrap_or_else(PoisonError::into_inner).upgrade() }
    }

    fn acquire(&self) -> Arc<Running> {
        // A test that could not start the mesh leaves the lock poisoned; the next test tries again.
        let mut slot = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = slot.upgrade() {
            return running;
        }
        let (manifests, options) = (self.start)();
        let mesh = RUNTIME.block_on(Mesh::start(manifests, options));
        let mesh = mesh.unwrap_or_else(|error| panic!("{error:#}"));
        let running = Arc::new(Running { mesh: Some(mesh) });
        *slot = Arc::downgrade(&running);
        running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mesh) = self.mesh.take()
            && let Err(error) = RUNTIME.block_on(mesh.stop())
        {
            eprintln!("a shared mesh was not cleaned up: {error:#}");
        }
    }
}
