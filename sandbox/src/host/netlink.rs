//! Netlink: a socket in the calling thread's network namespace, and operations for all links.

use nix::net::if_::if_nametoindex;
use rtnetlink::{Handle, LinkUnspec};

use super::{HostError, Result};

/// Runs a function with a netlink socket of the calling thread's namespace, and waits for it.
///
/// # Errors
/// When the socket cannot be opened, or the function fails.
pub(super) fn on_netlink<T>(talk: impl AsyncFnOnce(Handle) -> Result<T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(HostError::OpenNetlink)?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(HostError::OpenNetlink)?;
        tokio::spawn(connection);
        talk(handle).await
    })
}

/// Enables a link.
///
/// # Errors
/// When the link does not exist, or the kernel refuses.
pub(super) async fn up(handle: &Handle, name: &str) -> Result<()> {
    let link = LinkUnspec::new_with_index(index_of(name)?).up().build();
    handle.link().change(link).execute().await.map_err(refused(|| format!("bring link {name} up")))
}

/// The index of a link in the calling thread's namespace.
///
/// # Errors
/// When the link does not exist.
pub(super) fn index_of(name: &str) -> Result<u32> {
    if_nametoindex(name).map_err(|errno| HostError::FindLink { name: name.to_owned(), source: errno.into() })
}

/// The error for an operation that the kernel refuses.
pub(super) fn refused(act: impl FnOnce() -> String) -> impl FnOnce(rtnetlink::Error) -> HostError {
    |source| HostError::ConfigureNetwork { act: act(), source }
}
