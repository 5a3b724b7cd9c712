"""The files of `deploy/` against the code: flags, ports, routes, metrics and grace periods are
those of frame, and objects are valid in the versions of Kubernetes that the documentation names."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from httpx import AsyncClient

from frame.config.schema import FrameConfig
from frame.core.messages import Heartbeat
from frame.entrypoints.cli.router import command as router_command
from frame.entrypoints.configuration.sources import LoadedConfig, load_config
from frame.entrypoints.handoff import KEY_VARIABLE
from frame.entrypoints.http.operations.admin import health_router
from frame.entrypoints.router.discovery import Source
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.scaling import DesiredReplicas, ScalingTargets
from tests.entrypoints.inprocess import serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FOREIGN = ("keda.sh", "inference.networking.k8s.io", "kustomize.config.k8s.io")
STOP_TIME = 10  # seconds in which a server ends its processes after the drain
DEFAULT = FrameConfig()


def read(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


OBJECTS = [(path, each) for path in sorted(KUBERNETES.rglob("*.yaml")) if path.name != "frame.yaml" for each in read(path)]
NAMES = [f"{path.parent.name}/{each['kind']}-{each.get('metadata', {}).get('name', '')}" for path, each in OBJECTS]


def apply_patches(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization with its JSON patches, of which `add` at the end of a list is
    known."""
    (kustomization,) = read(folder / "kustomization.yaml")
    built: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        built += apply_patches(path) if path.is_dir() else copy.deepcopy(read(path))
    for patch in kustomization.get("patches", ()):
        (target,) = [o for o in built if (o["kind"], o["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])]
        for operation in yaml.safe_load(patch["patch"]):
            *steps, last = operation["path"].strip("/").split("/")
            assert (operation["op"], last) == ("add", "-")
            place: Any = target
            for step in steps:
                place = place[int(step) if step.isdigit() else step]
            place.append(operation["value"])
    return built


FOLDERS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))


def containers(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for each in apply_patches(folder):
        if each["kind"] in ("StatefulSet", "Deployment"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            yield each, container


def load_serve(args: list[str], file: Path | None, environ: dict[str, str]) -> LoadedConfig:
    """The configuration of `frame serve ARGS`."""
    flags = {}
    for arg in args[1:]:
        name, sign, value = arg.removeprefix("--").partition("=")
        assert arg.startswith("--") and sign, arg
        flags[name] = value
    return load_config(None if file is None else str(file), flags, environ=environ)


def config_of(container: dict[str, Any]) -> FrameConfig:
    sent = {entry["name"]: entry.get("value", "s" * 32) for entry in container.get("env", ())} | {"POD_INDEX": "1", "POD_NAME": "frame-0"}
    args = [re.sub(r"\$\((\w+)\)", lambda found: sent[found[1]], arg) for arg in container["args"]]
    file = KUBERNETES / "base/frame.yaml" if "FRAME_CONFIG" in sent else None
    own = {name: value for name, value in sent.items() if name.startswith("FRAME_") and name != "FRAME_CONFIG"}
    return load_serve(args, file, own).config


# validity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(31, 38)])
def test_objects_are_valid(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    checked = [each for _, each in OBJECTS if not each["apiVersion"].startswith(FOREIGN)]
    checked += [each for each in apply_patches(KUBERNETES / "inference-pool") if not each["apiVersion"].startswith(FOREIGN)]
    assert len(checked) > 12
    for each in checked:
        validator.validate(each, version, strict=True)
    broken = copy.deepcopy(next(each for each in checked if each["kind"] == "StatefulSet"))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_objects_of_other_projects() -> None:
    """KEDA's ScaledObject v1alpha1 and the extension's InferencePool v1, by their documents."""
    scaled, pool = read(KUBERNETES / "autoscaling/keda.yaml")[0], read(KUBERNETES / "inference-pool/pool.yaml")[0]
    known = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "advanced", "triggers"}
    assert scaled["spec"].keys() == known
    assert all(isinstance(value, str) for trigger in scaled["spec"]["triggers"] for value in trigger["metadata"].values())
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["targetPorts"] == [{"number": DEFAULT.server.port}]


# flags, ports, probes, grace periods --------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_arguments_are_those_of_the_commands(folder: Path) -> None:
    found = list(containers(folder))
    assert found
    for _, container in found:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if container["args"][0] == "router":
            params = router_command.make_context("router", container["args"][1:]).params
            assert (params["host"], params["port"]) == ("0.0.0.0", ports["http"])
            default = next(each.default for each in router_command.params if each.name == "port")
            assert params["port"] == default
        else:
            config = config_of(container)
            assert (config.server.host, config.server.port, DEFAULT.server.port) == ("0.0.0.0", ports["http"], ports["http"])
            assert config.server.api_key, "a server that other machines reach has a key"
            for name, endpoint in (("kv-events", config.cache.events_endpoint), ("kv-replay", config.cache.events_replay_endpoint)):
                assert (endpoint is not None) == (name in ports) and (endpoint is None or endpoint == f"tcp://*:{ports[name]}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_probes_and_grace_periods(folder: Path) -> None:
    health = {route.path for route in health_router.routes}
    for owner, container in containers(folder):
        pod = owner["spec"]["template"]["spec"]
        is_router = container["args"][0] == "router"
        names = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["path"] in ({"/health"} if is_router else health) and probe["httpGet"]["port"] in names
        assert container["readinessProbe"]["httpGet"]["path"] == ("/health" if is_router else "/health/ready")
        if "livenessProbe" in container and not is_router:
            assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
        drain = DEFAULT.server.drain_timeout if is_router else config_of(container).server.drain_timeout
        assert pod["terminationGracePeriodSeconds"] >= container["lifecycle"]["preStop"]["sleep"]["seconds"] + drain + STOP_TIME


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_pods_have_no_rights(folder: Path) -> None:
    for owner, container in containers(folder):
        pod, security = owner["spec"]["template"]["spec"], container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert written <= {"/tmp", "/home/frame", "/dev/shm"} and "/tmp" in written
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
            assert f"USER {pod['securityContext']['runAsUser']}\n" in (DEPLOY / "docker" / name).read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_selectors_and_ports_fit(folder: Path) -> None:
    objects = apply_patches(folder)
    pods = [(owner["spec"]["template"]["metadata"]["labels"], container["ports"]) for owner, container in containers(folder)]
    for each in objects:
        spec = each["spec"]
        selector = spec.get("selector") or spec.get("podSelector") or {}
        selector = selector.get("matchLabels", selector)
        if not selector:
            continue
        selector = {name: value for name, value in selector.items() if name != "apps.kubernetes.io/pod-index"}  # of the cluster
        (ports,) = [ports for labels, ports in pods if selector.items() <= labels.items()]
        names = {port["name"] for port in ports}
        if each["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= names
        if each["kind"] == "NetworkPolicy":
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == names
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for each in objects:
        if each["kind"] == "StatefulSet":
            service = services[each["spec"]["serviceName"]]["spec"]
            assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_the_router_finds_all_replicas() -> None:
    (replicas,) = [each for each, _ in containers(KUBERNETES / "base") if each["kind"] == "StatefulSet"]
    (router,) = [container for each, container in containers(KUBERNETES / "base") if each["kind"] == "Deployment"]
    maximum = read(KUBERNETES / "autoscaling/keda.yaml")[0]["spec"]["maxReplicaCount"]
    assert maximum == read(KUBERNETES / "autoscaling/hpa.yaml")[0]["spec"]["maxReplicas"] >= replicas["spec"]["replicas"]
    (source,) = router_command.make_context("router", router["args"][1:]).params["sources"]
    assert source == f"http://{replicas['spec']['serviceName']}:{DEFAULT.server.port}"
    assert Source(source)
    for _, container in containers(KUBERNETES / "base"):
        assert KEY_VARIABLE in {each["name"] for each in container["env"]}


def test_hosts_of_one_server() -> None:
    ((owner, container),) = containers(KUBERNETES / "multi-host")
    parallel = config_of(container).parallel
    assert (parallel.nnodes, parallel.node_rank) == (owner["spec"]["replicas"], 1)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert parallel.tp == gpus * parallel.nnodes
    host, _, port = str(parallel.dist_init_addr).partition(":")
    assert host == f"{owner['metadata']['name']}-0.{owner['spec']['serviceName']}"
    assert int(port) in {each["containerPort"] for each in container["ports"]}
    assert "FRAME_DIST_KEY" in {each["name"] for each in container["env"]}


async def test_metrics_are_those_of_a_server_or_a_router() -> None:
    texts = [(KUBERNETES / "autoscaling" / name).read_text() for name in ("keda.yaml", "hpa.yaml")]
    used = {name for text in texts for name in re.findall(r"\bframe_\w+", text)}
    async with serving() as served:
        served.services.client.load = Heartbeat("engine")
        text = (await served.request("GET", "/metrics")).body.decode()
        backends = Backends([], AsyncClient(), 1.0)
        backends.desired = DesiredReplicas(ScalingTargets(1.0, None))
        text += RouterMetrics(backends).render().decode()
    assert used and all(re.search(rf"^{name}\b", text, re.MULTILINE) for name in used), used


# images, compose, chart ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images(name: str) -> None:
    text = (DEPLOY / "docker" / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert f"EXPOSE {DEFAULT.server.port}\n" in text and 'ENTRYPOINT ["frame"]' in text and "STOPSIGNAL SIGTERM" in text
    allowed = re.findall(r"^!(.+)$", (DEPLOY / "docker" / f"{name}.dockerignore").read_text(), re.MULTILINE)
    assert {project["readme"], "frame", "pyproject.toml"} <= set(allowed) and all((ROOT / each).exists() for each in allowed)


def test_the_compose_file() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    services = compose["services"]
    for name, service in services.items():
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace >= DEFAULT.server.drain_timeout + STOP_TIME
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        command, *rest = service["command"]
        if command == "serve":
            pairs = dict(zip(rest[::2], rest[1::2], strict=True))
            config = load_serve([command, *(f"{flag}={value}" for flag, value in pairs.items())], None, {}).config
            assert (config.server.host, config.server.port) == ("0.0.0.0", DEFAULT.server.port)
            assert set(service["environment"]) == {"FRAME_SERVER__API_KEY"}
            assert f":{DEFAULT.server.port}/health/ready" in service["healthcheck"]["test"][-1]
        else:
            params = router_command.make_context(command, rest).params
            servers = [other for other in services if other.startswith("frame-")]
            assert params["replicas"] == tuple(f"http://{server}:{DEFAULT.server.port}" for server in servers)
            assert service["ports"] == [f"127.0.0.1:{params['port']}:{params['port']}"], name


def test_the_chart_wraps_the_base() -> None:
    chart = DEPLOY / "helm/frame"
    assert (chart / "base").resolve() == KUBERNETES / "base"
    template = (chart / "templates/manifests.yaml").read_text()
    (kustomization,) = read(KUBERNETES / "base/kustomization.yaml")
    wrapped = re.search(r"range list ((?:\"\w+\" ?)+)", template)
    assert wrapped and [f"{name}.yaml" for name in re.findall(r"\w+", wrapped[1])] == kustomization["resources"]
    for name in ("replicas.yaml", "router.yaml"):
        assert "image: frame\n" in (KUBERNETES / "base" / name).read_text()
    (values,), (about,) = read(chart / "values.yaml"), read(chart / "Chart.yaml")
    assert values == {"image": "frame:cuda"} and about["kubeVersion"].startswith(">=1.31")


def test_unknown_values_are_refused() -> None:
    with pytest.raises(click.exceptions.NoSuchOption):
        router_command.make_context("router", ["--replicas=http://a"])
    with pytest.raises(Exception, match="Unknown flag --hosts"):
        load_serve(["serve", "--hosts=0.0.0.0"], None, {})
    assert CliRunner().invoke(router_command, ["--replica", "frame-0:30000"]).exit_code != 0
