"""The image and the manifests: what Kubernetes and the server would refuse or lose is refused here, without either."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from kvlingo.errors import BadInput
from kvlingo.serve.engine import SAVE_S, STOP_S
from kvlingo.serve.keys import Keys
from kvlingo.serve.settings import LOOPBACK, Settings, read_settings

REPO = Path(__file__).parents[1]
SCHEMA = json.loads((REPO / "tests" / "kubernetes.schema.json").read_text(encoding="utf-8"))
MANIFESTS = sorted((REPO / "deploy").glob("*.yaml"))
DOCKERFILE = (REPO / "Dockerfile").read_text(encoding="utf-8")
BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
Object = dict[str, Any]


def objects() -> list[Object]:
    return [x for file in MANIFESTS for x in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def of_kind(kind: str, found: list[Object] | None = None) -> Object:
    (one,) = (x for x in found or objects() if x["kind"] == kind)
    return one


def faults(one: Object) -> list[str]:
    """Return what the schema says of one object."""
    kind = one.get("kind")
    if kind not in SCHEMA["$defs"]:
        return [f"kind {kind}"]
    validator = Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]})
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(one)]


def container(found: list[Object] | None = None) -> Object:
    (one,) = of_kind("Deployment", found)["spec"]["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def pod() -> Object:
    spec = of_kind("Deployment")["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * BYTES[quantity[-2:]]


def settings() -> Settings:
    return Settings(**from_toml())


def from_toml() -> Object:
    table = tomllib.loads(of_kind("ConfigMap")["data"]["kvlingo.toml"])
    paths = {name: Path(table[name]) for name in ("keys", "cache_dir")}
    return {**table, **paths, "translators": tuple(map(Path, table["translators"]))}


OFFICIAL = ("1.28", "1.37")
"""Releases of Kubernetes whose own schemas are asked, the oldest and the newest."""

needs_official = pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="needs the Python package kubernetes-validate"
)


def official_faults(one: Object, version: str) -> list[str]:
    """Return what Kubernetes' own schema of a release says, which knows every field and takes no other."""
    import kubernetes_validate as official

    try:
        official.validate(one, version, strict=True)
    except (official.ValidationError, official.SchemaNotFoundError) as error:
        return [error.message]
    return []


def within(one: Any, step: str) -> Any:
    return one[int(step) if isinstance(one, list) else step]


def without(*path: str) -> Callable[[Object], None]:
    def change(one: Object) -> None:
        for step in path[:-1]:
            one = within(one, step)
        del one[path[-1]]

    return change


def with_value(value: Any, *path: str) -> Callable[[Object], None]:
    def change(one: Object) -> None:
        for step in path[:-1]:
            one = within(one, step)
        one[path[-1]] = value

    return change


# --- the schema ------------------------------------------------------------------------------------------------------


def test_the_manifests_keep_to_the_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    found = objects()
    assert sorted(x["kind"] for x in found) == [
        "ConfigMap",
        "Deployment",
        "PersistentVolumeClaim",
        "Pod",
        "Secret",
        "Service",
    ]
    assert [fault for one in found for fault in faults(one)] == []


@needs_official
@pytest.mark.parametrize("version", OFFICIAL)
def test_the_manifests_keep_to_kubernetes_own_schemas(version: str) -> None:
    assert [fault for one in objects() for fault in official_faults(one, version)] == []


@needs_official
@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("Deployment", with_value(5, "spec", "template", "spec", "containers", "0", "name")),
        ("Deployment", with_value("RollingUpdates", "spec", "strategies")),
        ("Deployment", with_value(["x"], "spec", "selector")),
        ("Deployment", without("spec", "selector")),
        ("Deployment", with_value("8000", "spec", "replicas")),
        ("Service", with_value({"name": "x"}, "spec", "ports")),
        ("PersistentVolumeClaim", with_value([1], "spec", "accessModes")),
        ("ConfigMap", with_value({"kvlingo.toml": 5}, "data")),
        ("Pod", without("spec", "containers")),
        ("Secret", with_value("CronJob", "kind")),
        ("Deployment", with_value("extensions/v1beta1", "apiVersion")),
    ],
)
def test_kubernetes_own_schemas_see_what_is_wrong(kind: str, harm: Callable[[Object], None]) -> None:
    one = copy.deepcopy(of_kind(kind))
    harm(one)
    assert official_faults(one, OFFICIAL[-1])


@pytest.mark.parametrize(
    "harm",
    [
        without("livenessProbe"),
        without("readinessProbe"),
        without("resources", "limits"),
        without("resources", "limits", "memory"),
        with_value("lots", "resources", "limits", "memory"),
        with_value(2, "resources", "limits", "cpu"),
        with_value(True, "securityContext", "allowPrivilegeEscalation"),
        with_value([], "securityContext", "capabilities", "drop"),
        with_value(True, "privileged"),
        with_value({"exec": {"command": ["true"]}}, "livenessProbe"),
        with_value("healthz", "livenessProbe", "httpGet", "path"),
        with_value([{"name": "KVLINGO_PORT", "value": 8000}], "env"),
        with_value("Sometimes", "imagePullPolicy"),
    ],
)
def test_the_schema_sees_a_container_that_is_wrong(harm: Callable[[Object], None]) -> None:
    found = copy.deepcopy(objects())
    harm(container(found))
    assert faults(of_kind("Deployment", found))


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("Deployment", with_value("extensions/v1beta1", "apiVersion")),
        ("Deployment", with_value(2, "spec", "replicas")),
        ("Deployment", with_value(0, "spec", "template", "spec", "securityContext", "runAsUser")),
        ("Deployment", with_value([{"name": "x"}], "spec", "template", "spec", "volumes")),
        ("Service", with_value("LoadBalancer", "spec", "type")),
        ("PersistentVolumeClaim", with_value("40 GB", "spec", "resources", "requests", "storage")),
        ("ConfigMap", with_value({"kvlingo.toml": 5}, "data")),
        ("Secret", with_value("A name", "metadata", "name")),
        ("Secret", with_value("CronJob", "kind")),
    ],
)
def test_the_schema_sees_an_object_that_is_wrong(kind: str, harm: Callable[[Object], None]) -> None:
    one = copy.deepcopy(of_kind(kind))
    assert not faults(one)
    harm(one)
    assert faults(one)


# --- what belongs together -------------------------------------------------------------------------------------------


def test_the_settings_are_those_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "kvlingo.toml"
    file.write_text(of_kind("ConfigMap")["data"]["kvlingo.toml"])
    read, origin = read_settings({}, {}, file)
    assert read == settings()
    assert set(origin.values()) == {str(file)}
    assert read.keys is not None
    assert not read.anyone
    with pytest.raises(BadInput, match="--keys"):  # without keys it would not listen on a network
        Settings(**{**from_toml(), "keys": None})


def test_probes_ask_where_the_server_answers() -> None:
    (port,) = container()["ports"]
    assert port["containerPort"] == settings().port
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    (service,) = of_kind("Service")["spec"]["ports"]
    assert service["targetPort"] == port["name"]


def test_what_is_mounted_is_there_and_where_the_settings_look_for_it() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    listed = container()["volumeMounts"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in listed if "subPath" not in mount}
    assert set(volumes) == set(mounts)
    assert (
        volumes["cache"]["persistentVolumeClaim"]["claimName"] == of_kind("PersistentVolumeClaim")["metadata"]["name"]
    )
    assert volumes["keys"]["secret"]["secretName"] == of_kind("Secret")["metadata"]["name"]
    assert volumes["settings"]["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]
    told = settings()
    assert told.cache_dir is not None
    assert told.keys is not None
    assert mounts["cache"] in told.cache_dir.parents
    assert told.keys.parent == mounts["keys"]
    assert told.keys.name in of_kind("Secret")["stringData"]
    (part,) = (mount for mount in listed if "subPath" in mount)
    assert (part["name"], part["readOnly"]) == ("cache", True)
    assert {folder.parent for folder in told.translators} == {Path(part["mountPath"])}
    _, flag, config = container()["args"]
    assert flag == "--config"
    assert Path(config).parent == mounts["settings"]
    assert Path(config).name in of_kind("ConfigMap")["data"]


def test_there_is_room_for_what_the_settings_allow() -> None:
    told, limits = settings(), container()["resources"]["limits"]
    storage = of_kind("PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"]
    assert told.cache_disk_bytes is not None
    assert told.cache_disk_bytes < 0.8 * num_bytes(storage)  # models are fetched there too
    # What waits to be written is a quarter more, and a snapshot on its way to a file is held about twice.
    assert 2 * told.cache_bytes < 0.6 * num_bytes(limits["memory"])
    requests = container()["resources"]["requests"]
    assert num_bytes(requests["memory"]) <= num_bytes(limits["memory"])


def test_there_is_time_to_end() -> None:
    assert pod()["terminationGracePeriodSeconds"] >= settings().drain_s + STOP_S + SAVE_S + 10


def test_a_translator_is_copied_where_the_server_looks_for_it() -> None:
    """By a pod of the same rights on the same volume, which no service leads to."""
    fill = of_kind("Pod")
    (holder,), (volume,) = fill["spec"]["containers"], fill["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == of_kind("PersistentVolumeClaim")["metadata"]["name"]
    context = pod()["securityContext"]
    assert {name: context[name] for name in fill["spec"]["securityContext"]} == fill["spec"]["securityContext"]
    assert holder["image"] == container()["image"]
    assert fill["metadata"]["labels"] != of_kind("Service")["spec"]["selector"]
    (part,) = (mount for mount in container()["volumeMounts"] if "subPath" in mount)
    goal = f"kvlingo-fill:{holder['volumeMounts'][0]['mountPath']}/{part['subPath']}/{settings().translators[0].name}"
    assert goal in (REPO / "docs" / "serving.md").read_text(encoding="utf-8")


def test_one_set_of_labels_leads_to_the_pod() -> None:
    deployment = of_kind("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == of_kind("Service")["spec"]["selector"]


def test_the_secret_is_read_as_keys_and_holds_none(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(of_kind("Secret")["stringData"]["keys"])
    assert Keys.read(file).tenant("Bearer anything") is None


# --- the image -------------------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, continued lines joined."""
    lines = re.sub(r"\\\n", " ", "\n".join(x for x in text.splitlines() if not x.startswith("#"))).splitlines()
    return [(a.upper(), " ".join(b.split())) for a, _, b in (line.strip().partition(" ") for line in lines) if a]


def last(name: str) -> str:
    return [value for instruction, value in instructions(DOCKERFILE) if instruction == name][-1]


def test_the_image_runs_without_rights_as_the_manifests_say() -> None:
    user, _, group = last("USER").partition(":")
    context = pod()["securityContext"]
    assert (int(user), int(group)) == (context["runAsUser"], context["runAsGroup"])
    assert int(user) > 0
    order = [name for name, _ in instructions(DOCKERFILE)]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name in ("COPY", "RUN"))


def test_the_image_listens_on_loopback_unless_told() -> None:
    environment = last("ENV")
    assert "KVLINGO_HOST" not in environment
    assert "KVLINGO_ANYONE" not in environment
    assert "--anyone" not in DOCKERFILE
    assert "--host" not in last("CMD") + last("ENTRYPOINT")
    assert Settings().host in LOOPBACK
    assert json.loads(last("ENTRYPOINT")) + json.loads(last("CMD")) == ["kvlingo", "serve"]
    assert str(Settings().port) == last("EXPOSE")


def test_the_healthcheck_is_a_program_that_asks_healthz(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    words = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert words[:2] == ["python", "-c"]
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url))
    for port in ("", "9000"):
        monkeypatch.setenv("KVLINGO_PORT", port)
        exec(compile(words[2], "healthcheck", "exec"), {})
    assert asked == ["http://127.0.0.1:8000/healthz", "http://127.0.0.1:9000/healthz"]


def test_the_image_has_what_the_server_can_use() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.search(r"'\.\[([a-z,]+)\]'", DOCKERFILE)
    assert found is not None
    extras = set(found[1].split(","))
    assert extras <= set(project["optional-dependencies"])
    assert {"serve", "json", "otel", "route"} <= extras


def test_the_image_has_the_version_that_is_tested_and_the_package_alone() -> None:
    wanted = re.search(r"^TORCH := torch==(\S+)$", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert wanted is not None
    assert f"TORCH={wanted[1]}" in [value for name, value in instructions(DOCKERFILE) if name == "ARG"]
    assert "/cpu" in DOCKERFILE
    copied = {
        word.rstrip("/") for name, value in instructions(DOCKERFILE) if name == "COPY" for word in value.split()[:-1]
    }
    allowed = {x[1:] for x in (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines() if x.startswith("!")}
    assert copied - {"--from=build", "/app"} == allowed
    assert all((REPO / name).exists() for name in allowed)
