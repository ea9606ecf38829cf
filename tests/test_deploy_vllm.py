"""Two vLLM servers, a shared store and the gateway: what Kubernetes, compose or the connector would refuse is refused here.

No cluster and no GPU has run these files: what is checked is that they keep to the schema and fit together.
"""

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
from jsonschema.validators import validator_for

from kvlingo.serve.external.redis_store import PASSWORD, read_address
from kvlingo.serve.external.servers import MIDDLEWARE
from kvlingo.serve.settings import read_settings
from tests.test_deploy import (
    OFFICIAL,
    REPO,
    Object,
    faults,
    instructions,
    needs_official,
    num_bytes,
    official_faults,
    with_value,
    without,
)

FOLDER = REPO / "deploy" / "vllm"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
SECRET = yaml.safe_load((REPO / "deploy" / "secret.example.yaml").read_text(encoding="utf-8"))
ENGINES = {"small": "vllm-small", "big": "vllm-big"}


def objects() -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))


def named(kind: str, name: str, found: list[Object] | None = None) -> Object:
    (one,) = (x for x in found or objects() if x["kind"] == kind and x["metadata"]["name"] == name)
    return one


def pod(name: str) -> Object:
    spec = named("Deployment", name)["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container(name: str, found: list[Object] | None = None) -> Object:
    (one,) = named("Deployment", name, found)["spec"]["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def compose() -> Object:
    whole = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert isinstance(whole, dict)
    return whole


def flags(words: list[str]) -> dict[str, str]:
    """Return --NAME=VALUE words as a dict; any other word but a first `serve` is a mistake here."""
    pairs = [re.fullmatch(r"--([a-z-]+)=(.*)", word, re.DOTALL) for word in words[words[:1] == ["serve"] :]]
    assert all(pairs), words
    return {pair[1]: pair[2] for pair in pairs if pair}


def transfer(words: list[str]) -> Object:
    told = json.loads(flags(words)["kv-transfer-config"])
    assert isinstance(told, dict)
    return told


# --- the schema ------------------------------------------------------------------------------------------------------


def test_the_manifests_keep_to_the_schema() -> None:
    found = objects()
    assert sorted((x["kind"], x["metadata"]["name"]) for x in found) == [
        ("Deployment", "gateway"),
        ("Deployment", "vllm-big"),
        ("Deployment", "vllm-small"),
        ("PersistentVolumeClaim", "kvlingo-store"),
        ("Service", "gateway"),
        ("Service", "vllm-big"),
        ("Service", "vllm-small"),
    ]
    assert [fault for one in found for fault in faults(one)] == []


@needs_official
@pytest.mark.parametrize("version", OFFICIAL)
def test_the_manifests_keep_to_kubernetes_own_schemas(version: str) -> None:
    assert [fault for one in (*objects(), *with_redis()) for fault in official_faults(one, version)] == []


@pytest.mark.parametrize(
    "harm",
    [
        without("livenessProbe"),
        without("resources", "limits", "memory"),
        with_value("half", "resources", "limits", "nvidia.com/gpu"),
        with_value("0", "resources", "requests", "nvidia.com/gpu"),
        with_value("1", "resources", "limits", "amd.com/gpu"),
        with_value(True, "securityContext", "allowPrivilegeEscalation"),
        with_value("health", "readinessProbe", "httpGet", "path"),
    ],
)
def test_the_schema_sees_an_engine_that_is_wrong(harm: Callable[[Object], None]) -> None:
    found = copy.deepcopy(objects())
    harm(container("vllm-big", found))
    assert faults(named("Deployment", "vllm-big", found))


def test_the_schema_sees_a_store_that_is_wrong() -> None:
    claim = copy.deepcopy(named("PersistentVolumeClaim", "kvlingo-store"))
    claim["spec"]["accessModes"] = ["ReadWriteSometimes"]
    assert faults(claim)


# --- what belongs together -------------------------------------------------------------------------------------------


def all_engines() -> list[tuple[str, list[str]]]:
    services = compose()["services"]
    return [
        *((name, container(deployed)["args"]) for name, deployed in ENGINES.items()),
        *((name, services[name]["command"]) for name in ENGINES),
    ]


def test_the_connector_is_asked_for_as_it_wants() -> None:
    roles = {"small": "kv_producer", "big": "kv_both"}
    for name, words in all_engines():
        told = transfer(words)
        assert told["kv_connector_module_path"] == "kvlingo.serve.vllm"
        assert told["kv_connector"] == "KVLingoConnector"
        assert told["kv_role"] == roles[name]
        assert told["kv_load_failure_policy"] == "recompute"  # vLLM's default ends the request
        assert flags(words)["served-model-name"] == name
        assert flags(words)["middleware"] == MIDDLEWARE  # else the gateway is not told what came of a hand-over


def test_the_connector_knows_its_options() -> None:
    options = pytest.importorskip("kvlingo.serve.external.options", reason="this build has no connector for vLLM")
    for _, words in all_engines():
        options.read_options(transfer(words)["kv_connector_extra_config"])


def test_both_engines_keep_caches_in_one_place_that_both_may_write() -> None:
    claim = named("PersistentVolumeClaim", "kvlingo-store")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name, deployed in ENGINES.items():
        volumes = {volume["name"]: volume for volume in pod(deployed)["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(deployed)["volumeMounts"]}
        assert set(volumes) == set(mounts)
        assert volumes["store"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        extra = transfer(container(deployed)["args"])["kv_connector_extra_config"]
        for place in (extra["store"], *extra.get("translators", ())):
            assert Path(mounts["store"]) in Path(place).parents, name
        assert extra["max_bytes"] < 0.8 * num_bytes(claim["spec"]["resources"]["requests"]["storage"])
        # The connector keeps a copy of the target's weights, and the maps, in the machine's memory.
        limits = container(deployed)["resources"]["limits"]
        assert num_bytes(limits["memory"]) >= {"small": 8, "big": 32}[name] * 2**30
        assert limits["nvidia.com/gpu"] == container(deployed)["resources"]["requests"]["nvidia.com/gpu"]


def test_what_is_written_is_mounted() -> None:
    """The root of the file system is read-only: each place that the image names for writing has a volume."""
    places = dict(re.findall(r"([A-Z_]+)=(\S+)", dict(instructions(DOCKERFILE))["ENV"]))
    for deployed in ENGINES.values():
        mounts = [Path(mount["mountPath"]) for mount in container(deployed)["volumeMounts"]]
        assert all(any(mount in (Path(place), *Path(place).parents) for mount in mounts) for place in places.values())
        assert {Path("/tmp"), Path("/dev/shm")} <= set(mounts)


def test_the_gateway_leads_to_the_engines_and_asks_for_keys() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container("gateway")["volumeMounts"]}
    mounted = [volume.split(":")[1] for volume in compose()["services"]["gateway"]["volumes"]]
    for words, hosts, keys in (
        (container("gateway")["args"], ENGINES.values(), f"{mounts['keys']}/keys"),
        (compose()["services"]["gateway"]["command"], ENGINES, mounted[0]),
    ):
        assert words[0] == "serve"
        settings, _ = read_settings(flags(words), {})
        assert settings.engine_urls == tuple(f"http://{host}:8000" for host in hosts)
        assert (settings.host, settings.keys) == ("0.0.0.0", Path(keys))
    volumes = {volume["name"]: volume for volume in pod("gateway")["volumes"]}
    assert set(volumes) == set(mounts)
    assert volumes["keys"]["secret"]["secretName"] == SECRET["metadata"]["name"]
    assert "keys" in SECRET["stringData"]
    assert Path(mounts["cache"]) == Path("/cache")  # where the image writes
    for name, words in all_engines():
        assert flags(words)["port"] == "8000", name


@pytest.mark.parametrize("name", ["gateway", *ENGINES.values()])
def test_services_and_probes_lead_to_the_pods(name: str) -> None:
    deployment, service = named("Deployment", name)["spec"], named("Service", name)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == service["selector"]
    (port,) = container(name)["ports"]
    assert port["containerPort"] == int(flags(container(name)["args"])["port"])
    assert service["ports"][0]["targetPort"] == port["name"]
    probes = [container(name)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    paths = ["/readyz", "/readyz", "/healthz"] if name == "gateway" else ["/health"] * 3
    assert probes == [{"path": path, "port": port["name"]} for path in paths]
    if name != "gateway":
        assert service["ports"][0]["port"] == 8000  # where the gateway looks


# --- compose ---------------------------------------------------------------------------------------------------------


def compose_faults(whole: Object) -> list[str]:
    """Return what the Compose specification's own schema says, which check-jsonschema carries."""
    from importlib.resources import files

    name = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(name.read_text(encoding="utf-8"))
    return [error.message for error in validator_for(schema)(schema).iter_errors(whole)]


needs_compose = pytest.mark.skipif(
    importlib.util.find_spec("check_jsonschema") is None, reason="needs the Python package check-jsonschema"
)


@needs_compose
@pytest.mark.parametrize("file", ["compose.yaml", "compose.redis.yaml"])
def test_compose_keeps_to_its_own_schema(file: str) -> None:
    whole = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    assert compose_faults(whole) == []
    for harm in (
        with_value(["x"], "services", "gateway", "depends"),
        with_value({"a": 1}, "services", "gateway", "command"),
        with_value("yes", "volumes"),
    ):
        wrong = copy.deepcopy(whole)
        wrong["services"].setdefault("gateway", {})
        harm(wrong)
        assert compose_faults(wrong)


def test_compose_says_the_same_as_kubernetes() -> None:
    for name, deployed in ENGINES.items():
        here, there = (flags(x) for x in (compose()["services"][name]["command"], container(deployed)["args"]))
        assert {k: v for k, v in here.items() if k != "kv-transfer-config"} == {
            k: v for k, v in there.items() if k != "kv-transfer-config"
        }
        mine, theirs = (json.loads(x["kv-transfer-config"]) for x in (here, there))
        places = [x["kv_connector_extra_config"].pop("translators", []) for x in (mine, theirs)]
        assert mine == theirs
        assert [[Path(x).name for x in each] for each in places] == [[Path(x).name for x in places[0]]] * 2


def test_the_production_stack_gets_what_our_manifests_give() -> None:
    """The chart writes `vllm serve MODEL`, host and port itself; the rest of the arguments, and the store, are the same."""
    told = yaml.safe_load((FOLDER / "production-stack.values.yaml").read_text(encoding="utf-8"))
    models = told["servingEngineSpec"]["modelSpec"]
    assert [model["name"] for model in models] == list(ENGINES)
    for model in models:
        ours = container(ENGINES[model["name"]])
        wanted = flags(ours["args"])
        assert f"{model['repository']}:{model['tag']}" == ours["image"]
        assert model["modelURL"] == wanted.pop("model")
        assert str(told["servingEngineSpec"]["containerPort"]) == wanted.pop("port")
        given = flags(model["vllmConfig"]["extraArgs"])
        assert json.loads(given.pop("kv-transfer-config")) == json.loads(wanted.pop("kv-transfer-config"))
        assert given == wanted
        mounted = {mount["name"]: mount["mountPath"] for mount in model["extraVolumeMounts"]}
        assert mounted == {"store": "/store", "cache": "/cache"}
        assert {volume["name"] for volume in model["extraVolumes"]} == set(mounted)
        claim = next(v["persistentVolumeClaim"]["claimName"] for v in model["extraVolumes"] if v["name"] == "store")
        assert named("PersistentVolumeClaim", claim)
    assert told["routerSpec"] == {"enableRouter": False}


def test_compose_mounts_what_it_names_and_listens_on_loopback() -> None:
    whole = compose()
    known = set(whole["volumes"])
    for service in whole["services"].values():
        mounts = [mount.split(":") for mount in service.get("volumes", ())]
        assert {source for source, *_ in mounts if not source.startswith(".")} <= known
        words = service["command"]
        if any(word.startswith("--kv-transfer-config") for word in words):
            extra = transfer(words)["kv_connector_extra_config"]
            targets = {Path(target) for _, target, *_ in mounts}
            assert all(targets & set(Path(x).parents) for x in (extra["store"], *extra.get("translators", ())))
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= set(whole["services"])
    assert [name for name, service in whole["services"].items() if "ports" in service] == ["gateway"]
    devices = [
        device["device_ids"]
        for service in whole["services"].values()
        for device in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", ())
    ]
    assert devices == [["0"], ["1"]]


# --- with Redis ------------------------------------------------------------------------------------------------------


def with_redis() -> list[Object]:
    """Return what `kubectl apply -k` makes: lists of words are replaced, containers and variables go by their names."""
    told = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    found = [x for file in told["resources"] for x in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))]
    for patch in (yaml.safe_load(one["patch"]) for one in told["patches"]):
        (new,) = patch["spec"]["template"]["spec"]["containers"]
        old = container(patch["metadata"]["name"], found)
        assert new.pop("name") == old["name"]
        assert set(new) <= {"args", "env"}
        old["args"] = new["args"]
        old["env"] = [*old.get("env", ()), *new["env"]]
    return found


def redis_compose() -> Object:
    whole = yaml.safe_load((FOLDER / "compose.redis.yaml").read_text(encoding="utf-8"))
    assert isinstance(whole, dict)
    return whole


def engines_with_redis() -> list[tuple[str, list[str], list[str]]]:
    """Return each engine's words, without Redis and with it."""
    found, services, base = with_redis(), redis_compose()["services"], compose()["services"]
    return [
        *((name, container(to)["args"], container(to, found)["args"]) for name, to in ENGINES.items()),
        *((name, base[name]["command"], services[name]["command"]) for name in ENGINES),
    ]


def test_with_redis_only_the_store_is_another() -> None:
    for _, before, after in engines_with_redis():
        told, new = transfer(before), transfer(after)
        address = read_address(new["kv_connector_extra_config"].pop("store"))
        assert (address.host, address.port) in (("kvlingo-redis", 6379), ("redis", 6379))
        assert told["kv_connector_extra_config"].pop("store") == "/store/caches"
        assert new == told
        assert {**flags(after), "kv-transfer-config": ""} == {**flags(before), "kv-transfer-config": ""}


def test_with_redis_the_manifests_keep_to_the_schema_and_lead_to_it() -> None:
    found = with_redis()
    assert [fault for one in found for fault in faults(one)] == []
    server, service = container("kvlingo-redis", found), named("Service", "kvlingo-redis", found)["spec"]
    assert service["ports"][0]["port"] == 6379
    assert service["ports"][0]["targetPort"] == server["ports"][0]["name"]
    assert server["ports"][0]["containerPort"] == int(server["args"][server["args"].index("--port") + 1])
    assert service["selector"] == named("Deployment", "kvlingo-redis", found)["spec"]["template"]["metadata"]["labels"]


def test_the_schema_sees_a_server_that_is_wrong() -> None:
    for harm in (
        without("readinessProbe", "tcpSocket"),
        with_value({"path": "/", "port": "redis"}, "readinessProbe", "httpGet"),
        with_value([{"name": "A"}], "env"),
        with_value([{"name": "A", "value": "b", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}], "env"),
    ):
        found = with_redis()
        harm(container("kvlingo-redis", found))
        assert faults(named("Deployment", "kvlingo-redis", found))


def test_the_password_is_the_same_on_both_sides_and_in_no_argument() -> None:
    found = with_redis()
    secret = named("Secret", "kvlingo-redis", found)["stringData"]
    assert secret["redis.conf"].split() == ["requirepass", secret["password"]]
    for deployed in ENGINES.values():
        (variable,) = container(deployed, found)["env"]
        assert variable["name"] == PASSWORD
        assert variable["valueFrom"]["secretKeyRef"] == {"name": "kvlingo-redis", "key": "password"}
    whole = redis_compose()
    wanted = f"${{{PASSWORD}:?give the password of the store}}"
    assert whole["configs"]["redis"]["content"].split(maxsplit=1) == ["requirepass", wanted + "\n"]
    for name in ENGINES:
        assert whole["services"][name]["environment"] == {PASSWORD: wanted}
    assert not [one for _, _, words in engines_with_redis() for one in words if secret["password"] in one]


def test_redis_has_room_for_what_the_engines_keep_and_writes_no_file() -> None:
    server = container("kvlingo-redis", with_redis())
    for words in (server["args"], redis_compose()["services"]["redis"]["command"]):
        told = {word: words[place + 1] for place, word in enumerate(words) if word.startswith("--")}
        most = int(told["--maxmemory"].removesuffix("gb")) * 2**30
        assert (told["--save"], told["--appendonly"], told["--maxmemory-policy"]) == ("", "no", "volatile-ttl")
        assert all(
            transfer(after)["kv_connector_extra_config"]["max_bytes"] < most for _, _, after in engines_with_redis()
        )
        assert most < num_bytes(server["resources"]["limits"]["memory"])


# --- the image -------------------------------------------------------------------------------------------------------


def test_the_image_has_the_version_of_vllm_that_is_supported() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = [x for x in project["optional-dependencies"]["vllm"] if x.startswith("vllm")]
    (base,) = [value for name, value in instructions(DOCKERFILE) if name == "FROM"]
    assert base.split(":v")[1].startswith(wanted.split("==")[1].removesuffix("*"))


def test_the_image_runs_without_rights_as_the_manifests_say() -> None:
    (user,) = [value for name, value in instructions(DOCKERFILE) if name == "USER"]
    for deployed in ENGINES.values():
        context = pod(deployed)["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    order = [name for name, _ in instructions(DOCKERFILE)]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name in ("COPY", "RUN"))


def test_the_image_is_made_of_the_package_alone() -> None:
    copied = {word for name, value in instructions(DOCKERFILE) if name == "COPY" for word in value.split()[:-1]}
    allowed = {x[1:] for x in (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines() if x.startswith("!")}
    assert copied == allowed
    entry: list[Any] = json.loads(dict(instructions(DOCKERFILE))["ENTRYPOINT"])
    assert entry[-1] == "vllm.entrypoints.openai.api_server"
