//! A component that is asked for its answers, behind the interface of `weft.viz.v1`. Owns the credentials of its
//! requests: those that the component does not know any more are replaced, and the request is sent again. Its taps
//! outlive the component's pods.

mod resume;

use std::sync::Arc;

use parking_lot::Mutex;
use tonic::{Code, Request, Response, Status, metadata::AsciiMetadataValue, transport::Channel};
use weft_proto::viz::{
    EdgesRequest, EdgesResponse, RoutesRequest, RoutesResponse, SeriesRequest, SeriesResponse, StatInboundRequest,
    StatInboundResponse, StatOutboundRequest, StatOutboundResponse, StatRequest, StatResponse, TapRequest,
    viz_client::VizClient, viz_server::Viz,
};

use crate::rpc::TapStream;

/// The component's namespace: that of Linkerd's extension, whose name proxies expect.
pub const NAMESPACE: &str = "linkerd-viz";

/// By what a component knows the caller.
pub trait Credentials: Send + Sync + 'static {
    /// A new header `authorization`, in place of one that has expired or whose account is gone.
    ///
    /// # Errors
    /// A sentence for people: why there is none.
    fn renew(&self) -> impl Future<Output = Result<AsciiMetadataValue, String>> + Send;
}

/// A component's answers.
#[derive(Debug)]
pub struct Relay<C>(Arc<State<C>>);

#[derive(Debug)]
struct State<C> {
    client: VizClient<Channel>,
    credentials: C,
    /// What goes with every request.
    authorization: Mutex<AsciiMetadataValue>,
    /// Held while the header is renewed: a page asks several questions at a time, and one new header is enough for
    /// them.
    renewing: tokio::sync::Mutex<()>,
}

impl<C: Credentials> Relay<C> {
    /// Relays to the component behind the channel, with this header until the component does not know it.
    pub fn new(channel: Channel, authorization: AsciiMetadataValue, credentials: C) -> Self {
        let renewing = tokio::sync::Mutex::default();
        let authorization = Mutex::new(authorization);
        Self(Arc::new(State { client: VizClient::new(channel), credentials, authorization, renewing }))
    }
}

impl<C: Credentials> State<C> {
    fn authorization(&self) -> AsciiMetadataValue {
        self.authorization.lock().clone()
    }

    /// Sends a request, and sends it again if the component does not know the caller and there are other credentials.
    async fn ask<Q, A, F>(
        &self,
        question: Q,
        send: impl Fn(VizClient<Channel>, Request<Q>) -> F + Send,
    ) -> Result<Response<A>, Status>
    where
        Q: Clone + Send,
        F: Future<Output = Result<Response<A>, Status>> + Send,
    {
        let with = |authorization: &AsciiMetadataValue| {
            let mut request = Request::new(question.clone());
            request.metadata_mut().insert("authorization", authorization.clone());
            request
        };
        let used = self.authorization();
        match send(self.client.clone(), with(&used)).await {
            Err(unknown) if unknown.code() == Code::Unauthenticated => {
                let renewed = self.renewed(&used).await.map_err(|error| {
                    Status::unauthenticated(format!("{}; there is no new token: {error}", unknown.message()))
                })?;
                send(self.client.clone(), with(&renewed)).await
            }
            answer => answer,
        }
    }

    /// The header after this one.
    async fn renewed(&self, used: &AsciiMetadataValue) -> Result<AsciiMetadataValue, String> {
        let _turn = self.renewing.lock().await;
        let current = self.authorization();
        if current != *used {
            return Ok(current);
        }
        let renewed = self.credentials.renew().await?;
        *self.authorization.lock() = renewed.clone();
        Ok(renewed)
    }
}

#[tonic::async_trait]
impl<C: Credentials> Viz for Relay<C> {
    type TapStream = TapStream;

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.stat(request).await }).await
    }

    async fn stat_inbound(
        &self,
        request: Request<StatInboundRequest>,
    ) -> Result<Response<StatInboundResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.stat_inbound(request).await }).await
    }

    async fn stat_outbound(
        &self,
        request: Request<StatOutboundRequest>,
    ) -> Result<Response<StatOutboundResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.stat_outbound(request).await }).await
    }

    async fn routes(&self, request: Request<RoutesRequest>) -> Result<Response<RoutesResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.routes(request).await }).await
    }

    async fn edges(&self, request: Request<EdgesRequest>) -> Result<Response<EdgesResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.edges(request).await }).await
    }

    async fn series(&self, request: Request<SeriesRequest>) -> Result<Response<SeriesResponse>, Status> {
        self.0.ask(request.into_inner(), |mut client, request| async move { client.series(request).await }).await
    }

    async fn tap(&self, request: Request<TapRequest>) -> Result<Response<Self::TapStream>, Status> {
        let (state, question) = (Arc::clone(&self.0), request.into_inner());
        let open = move || {
            let (state, question) = (Arc::clone(&state), question.clone());
            async move {
                let events =
                    state.ask(question, |mut client, request| async move { client.tap(request).await }).await?;
                Ok::<TapStream, Status>(Box::pin(events.into_inner()))
            }
        };
        let first = open().await?;
        Ok(Response::new(Box::pin(resume::resumed(open, first))))
    }
}
