//! Good and malformed manifests.

use super::*;

const SERVICE: &str =
    "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  namespace: shop\nspec:\n  ports: [{port: 80}]\n";

/// Checks line, field and a part of the problem of every error; then the number of good objects.
fn check(file: &str, text: &str, errors: &[(usize, &str, &str)], good: usize) {
    let read = parse(Path::new(file), text);
    let got: Vec<_> = read.errors.iter().map(ToString::to_string).collect();
    assert_eq!(read.errors.len(), errors.len(), "{got:#?}");
    for (error, (line, field, problem)) in read.errors.iter().zip(errors) {
        assert_eq!((error.line, error.field.as_str()), (Some(*line), *field), "{error}");
        assert!(error.problem.contains(problem), "{error}");
    }
    assert_eq!(read.objects.len(), good, "{got:#?}");
}

#[test]
fn a_wrong_type_is_named_by_line_field_and_expectation() {
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\nspec:\n  replicas: two\n  selector: {}\n  template: {}\n";
    let text = format!("{SERVICE}---\n{deployment}---\n{SERVICE}");
    check("a.yaml", &text, &[(14, "spec.replicas", "expected i32")], 2);
    let error = &parse(Path::new("a.yaml"), &text).errors[0];
    assert_eq!(
        error.to_string(),
        "a.yaml:14:13: Deployment default/web: spec.replicas: invalid type: string \"two\", expected i32"
    );
}

#[test]
fn a_syntax_error_ends_its_document_only() {
    let text = format!("{SERVICE}---\nkind: [\n---\n{SERVICE}");
    let read = parse(Path::new("a.yaml"), &text);
    assert_eq!((read.objects.len(), read.errors.len()), (2, 1), "{:?}", read.errors);
    assert!(read.errors[0].line.is_some_and(|line| (9..=10).contains(&line)), "{}", read.errors[0]);
    check("a.yaml", "\tkind: x\n", &[(1, "", "")], 0);
}

#[test]
fn meaning_is_checked_and_located() {
    let policy = |spec: &str, kind: &str, version: &str| {
        format!(
            "apiVersion: policy.linkerd.io/{version}\nkind: {kind}\nmetadata:\n  name: p\n  namespace: shop\nspec:\n{spec}"
        )
    };
    let network =
        policy("  networks:\n  - cidr: 10.0.0.0/8\n  - cidr: 10.0.0/8\n", "NetworkAuthentication", "v1alpha1");
    check("a.yaml", &network, &[(9, "spec.networks[1].cidr", "expected a CIDR")], 0);
    let except = policy(
        "  networks:\n  - cidr: 10.0.0.0/8\n    except:\n    - 11.0.0.0/8\n",
        "NetworkAuthentication",
        "v1alpha1",
    );
    check("a.yaml", &except, &[(10, "spec.networks[0].except[0]", "not inside")], 0);
    let server = policy("  podSelector: {}\n  port: 80\n  accessPolicy: allow-all\n", "Server", "v1beta3");
    check("a.yaml", &server, &[(9, "spec.accessPolicy", "expected all-unauthenticated")], 0);
    let restrictive = parse(Path::new("a.yaml"), &server).errors.remove(0).restrictive;
    assert!(matches!(restrictive.as_deref(), Some(Object::Server(server)) if server.spec.access().is_err()));
    let annotated = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  annotations:\n    config.linkerd.io/skip-inbound-ports: 80-x\nspec:\n  containers: []\n";
    check(
        "a.yaml",
        annotated,
        &[(6, "metadata.annotations[\"config.linkerd.io/skip-inbound-ports\"]", "expected ports")],
        0,
    );
}

#[test]
fn something_stands_for_a_policy_with_a_wrong_type_and_for_nothing_else() {
    let policy = "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {name: p, labels: {a: b}}\n\
        spec: {podSelector: {}, port: []}\n";
    for text in [policy.to_owned(), format!("apiVersion: v1\nkind: List\nitems:\n- {}", policy.replace('\n', "\n  "))] {
        let mut read = parse(Path::new("a.yaml"), &text);
        assert_eq!((read.objects.len(), read.errors.len()), (0, 1), "{:?}", read.errors);
        let Some(Object::Server(server)) = read.errors.remove(0).restrictive.map(|object| *object) else {
            panic!("nothing stands for it: {text}")
        };
        assert_eq!(server.spec.port, crate::policy::EVERY_PORT);
        let metadata = server.metadata;
        assert_eq!((metadata.name.as_deref(), metadata.namespace.as_deref()), (Some("p"), Some("default")));
        assert_eq!(metadata.labels.unwrap()["a"], "b");
        assert!(metadata.annotations.unwrap()["weft.io/unreadable"].starts_with("spec.port: "));
    }
    let authorization = policy.replace("Server", "AuthorizationPolicy").replace("v1beta3", "v1alpha1");
    assert!(parse(Path::new("a.yaml"), &authorization).errors[0].restrictive.is_none(), "its absence denies");
    let service = SERVICE.replace("[{port: 80}]", "1");
    assert!(parse(Path::new("a.yaml"), &service).errors[0].restrictive.is_none());
}

#[test]
fn objects_need_kind_and_name() {
    check("a.yaml", "apiVersion: v1\n", &[(1, "kind", "expected a Kubernetes object")], 0);
    check("a.yaml", "kind: Pod\n", &[(1, "apiVersion", "expected a Kubernetes object")], 0);
    check(
        "a.yaml",
        "apiVersion: v1\nkind: ServiceAccount\nmetadata: {}\n",
        &[(3, "metadata.name", "expected the object's name")],
        0,
    );
    check("a.yaml", "just text\n", &[(1, "", "expected")], 0);
    check("a.yaml", "# nothing\n---\n---\n\n", &[], 0);
}

#[test]
fn an_api_version_of_another_time_is_refused() {
    check(
        "a.yaml",
        "apiVersion: apps/v1beta1\nkind: Deployment\nmetadata: {name: x}\nspec: {}\n",
        &[(1, "", "expected apps/v1")],
        0,
    );
}

#[test]
fn unknown_kinds_are_ignored_by_name() {
    let read = parse(Path::new("a.yaml"), "\n# job\napiVersion: batch/v1\nkind: CronJob\nmetadata: {name: j}\n");
    assert!(read.errors.is_empty() && read.objects.is_empty());
    let ignored = &read.ignored[0];
    assert_eq!((ignored.kind.as_str(), ignored.api_version.as_str(), ignored.line), ("CronJob", "batch/v1", 3));
    assert_eq!(ignored.name.as_deref(), Some("j"));
    assert!(
        ignored.to_string().ends_with(":3: CronJob j: Weft does not use this kind (batch/v1); ignored"),
        "{ignored}"
    );
}

#[test]
fn kinds_of_one_name_are_told_apart_by_their_group() {
    let route = |version: &str, kind: &str| {
        format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: r}}\nspec: {{rules: [{{}}]}}\n")
    };
    for (version, kind, expected) in [
        ("policy.linkerd.io/v1alpha1", "HTTPRoute", Kind::HttpRoute),
        ("policy.linkerd.io/v1beta3", "HTTPRoute", Kind::HttpRoute),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", Kind::GatewayHttpRoute),
        ("gateway.networking.k8s.io/v1beta1", "HTTPRoute", Kind::GatewayHttpRoute),
        ("gateway.networking.k8s.io/v1", "GRPCRoute", Kind::GrpcRoute),
        ("gateway.networking.k8s.io/v1alpha2", "TLSRoute", Kind::TlsRoute),
        ("gateway.networking.k8s.io/v1alpha2", "TCPRoute", Kind::TcpRoute),
    ] {
        let read = parse(Path::new("a.yaml"), &route(version, kind));
        assert!(read.errors.is_empty(), "{:?}", read.errors);
        assert_eq!(read.objects[0].object.kind(), expected, "{version} {kind}");
        assert_eq!((expected.name(), Kind::of(expected.group(), kind)), (kind, Some(expected)));
        assert!(version.starts_with(expected.group()));
    }
    assert_eq!(Kind::of("example.org", "HTTPRoute"), None);
}

#[test]
fn the_default_namespace_is_filled_in_where_there_is_one() {
    let read = parse(
        Path::new("a.yaml"),
        "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: n}\n",
    );
    let references: Vec<_> = read.objects.iter().map(|located| located.object.reference().to_string()).collect();
    assert_eq!(references, ["ServiceAccount default/a", "Namespace n"]);
}

#[test]
fn json_is_read_with_the_same_care() {
    check("a.json", r#"{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "\ud83d\ude00"}}"#, &[], 1);
    let service = "{\n  \"apiVersion\": \"v1\", \"kind\": \"Service\", \"metadata\": {\"name\": \"a\"},\n  \"spec\": {\n    \"ports\": [{\"port\": \"http\"}]\n  }\n}";
    check("a.json", service, &[(4, "spec.ports[0].port", "expected i32")], 0);
    check("a.json", "{\"kind\": ", &[(1, "kind", "EOF")], 0);
}

#[test]
fn lists_are_taken_apart() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: ServiceAccount\n  metadata: {name: a}\n- apiVersion: v1\n  kind: Service\n  metadata: {name: b}\n  spec: {ports: [{port: x}]}\n";
    check("a.yaml", text, &[(7, "items[1].spec.ports[0].port", "expected i32")], 1);
}

#[test]
fn directories_are_read_recursively_and_only_manifests() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("sub/b.yml"), SERVICE).unwrap();
    std::fs::write(dir.path().join("a.yaml"), SERVICE).unwrap();
    std::fs::write(dir.path().join("bad.json"), b"\xff").unwrap();
    std::fs::write(dir.path().join(".hidden.yaml"), "{").unwrap();
    std::fs::write(dir.path().join("readme.txt"), "{").unwrap();
    let read = load_dir(dir.path()).unwrap();
    assert_eq!((read.objects.len(), read.errors.len()), (2, 1), "{:?}", read.errors);
    assert!(read.errors[0].to_string().contains("bad.json: read:"), "{}", read.errors[0]);
    assert!(load_dir(&dir.path().join("none")).is_err());
}
