package main

import (
	"log"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	"github.com/cert-manager/cert-manager/pkg/controller"
	"github.com/cert-manager/cert-manager/pkg/controller/cainjector"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/clusterissuers"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
	trust "github.com/cert-manager/trust-manager/pkg/apis/trust/v1alpha1"
	"github.com/cert-manager/trust-manager/pkg/bundle"
	bundles "github.com/cert-manager/trust-manager/pkg/bundle/controller"
)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The argument is the namespace that both take cluster-wide sources from.
func main() {
	namespace := os.Args[1]
	klog.SetOutput(os.Stderr)
	ctrl.SetLogger(klog.Background())
	group, ctx := errgroup.WithContext(ctrl.SetupSignalHandler())
	// Before anything runs: what runs reads it without a lock.
	must(certmanager.AddToScheme(scheme.Scheme))
	must(trust.AddToScheme(scheme.Scheme))

	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		Kubeconfig:    os.Getenv("KUBECONFIG"),
		IssuerOptions: controller.IssuerOptions{ClusterResourceNamespace: namespace},
		CertificateOptions: controller.CertificateOptions{
			CertificateRequestMinimumBackoffDuration: time.Hour,
			CertificateRequestMaximumBackoffDuration: 32 * time.Hour,
		},
	})
	must(err)
	shared, err := factory.Build()
	must(err)
	for _, construct := range controller.Known() {
		one, err := construct(factory)
		must(err)
		group.Go(func() error { return one.Run(5, ctx) })
	}
	shared.SharedInformerFactory.Start(ctx.Done())
	shared.KubeSharedInformerFactory.Start(ctx.Done())

	config := ctrl.GetConfigOrDie()
	// Its first word names the owner of the fields that are written.
	config.UserAgent = "cert-manager-cainjector/test"
	manager := func(options ctrl.Options) ctrl.Manager {
		options.Scheme = scheme.Scheme
		options.Metrics = server.Options{BindAddress: "0"}
		made, err := ctrl.NewManager(config, options)
		must(err)
		return made
	}
	injector := manager(ctrl.Options{
		Client: client.Options{Cache: &client.CacheOptions{DisableFor: []client.Object{&core.Secret{}}}},
	})
	must(cainjector.RegisterAllInjectors(ctx, injector, cainjector.SetupOptions{
		EnableCertificatesDataSource: true,
		EnabledReconcilersFor: map[string]bool{
			cainjector.MutatingWebhookConfigurationName:   true,
			cainjector.ValidatingWebhookConfigurationName: true,
		},
	}))
	options := bundles.Options{Namespace: namespace}
	distributor := manager(ctrl.Options{Cache: bundle.CacheOpts(options)})
	must(bundle.SetupWithManager(ctx, distributor, options))
	group.Go(func() error { return injector.Start(ctx) })
	group.Go(func() error { return distributor.Start(ctx) })
	must(group.Wait())
}
