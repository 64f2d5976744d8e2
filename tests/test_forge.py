"""The files for forges and clusters are valid. The scripts, targets, alerts and pages that they name exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from alert_case import alerts
from hicache.console import parse_bytes
from hicache.integrations.server_store import ServerStoreConfig
from hicache.integrations.vllm.offloading_settings import offloading_settings

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
KUBERNETES = ROOT / "deploy/kubernetes"
KUBERNETES_VLLM = ROOT / "deploy/kubernetes-vllm.yaml"
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule"}  # kinds whose schema is not one of Kubernetes
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [ROOT / ".github/dependabot.yml"],
    "vendor.github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.github-issue-forms": [ROOT / f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature")],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
    "vendor.compose-spec": [ROOT / f"deploy/{name}.yaml" for name in ("compose", "nodes", "vllm")],
}


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_of_the_forge_fits_its_schema(schema: str) -> None:
    """Files of the forge fit their schema. The check needs no network."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema of the extra `release` is not installed")
    files = map(str, SCHEMAS[schema])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_call_the_scripts_of_the_gate() -> None:
    """Each script and target of a workflow exists, together they are all parts of `.ci/run`, and each declared Python
    is tested."""
    jobs = {f"{path.stem}.{name}": job for path in WORKFLOWS for name, job in loaded(path)["jobs"].items()}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for line in commands for found in re.findall(r"\bmake (.*)", line) for word in found.split()}
    scripts = {word for line in commands for word in re.findall(r"\.ci/\w+", line)}
    declared = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {".venv/.docs"}
    assert targets <= declared and all((ROOT / script).is_file() for script in scripts)
    gate = (ROOT / ".ci/run").read_text()
    assert set(re.findall(r"^make ([\w/.-]+)", gate, re.MULTILINE)) - {"budget"} <= targets
    assert set(re.findall(r"^(?:.*\|\| )?(\.ci/\w+)", gate, re.MULTILINE)) <= scripts
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d", line)}
    assert declared <= set(jobs["checks.tests"]["strategy"]["matrix"]["python"])
    assert all(job["timeout-minutes"] for job in jobs.values())


def test_manifests_are_valid() -> None:
    """Each Kubernetes object fits the strict schema of the newest release that the validator has. The kustomization
    lists every file of its folder."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    files = sorted(path for path in KUBERNETES.glob("*.yaml") if path.stem != "kustomization")
    assert sorted(loaded(KUBERNETES / "kustomization.yaml")["resources"]) == [path.name for path in files]
    objects = [one for path in files for one in yaml.safe_load_all(path.read_text())]
    assert {one["kind"] for one in objects} == OF_OPERATORS | {
        "Deployment",
        "Service",
        "PersistentVolumeClaim",
        "NetworkPolicy",
    }
    for one in (*objects, *yaml.safe_load_all(KUBERNETES_VLLM.read_text())):
        if one["kind"] not in OF_OPERATORS:
            validator.validate(one, validator.latest_version(), strict=True)


def test_the_pod_is_confined() -> None:
    """The pod does not run as root, cannot write to its image, and has no capability and no token. Only Prometheus and
    marked clients can reach the pod."""
    pod = loaded(KUBERNETES / "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all({"httpGet"} <= container[f"{probe}Probe"].keys() for probe in ("startup", "readiness", "liveness"))
    (rule,) = loaded(KUBERNETES / "network.yaml")["spec"]["ingress"]
    assert len(rule["from"]) == 2 and rule["ports"]
    server = loaded(ROOT / "deploy/compose.yaml")["services"]["hicache"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"] and all("127.0.0.1" in one for one in server["ports"])


def test_the_nodes_have_own_disks_and_one_remote_store() -> None:
    """The plug-in accepts the settings of both servers, which differ only in GPU, port and disk. The store has the key
    that both send, and no port is reachable from other machines."""
    compose = loaded(ROOT / "deploy/nodes.yaml")
    nodes = [compose["services"][name] for name in ("node-a", "node-b")]
    disks = [volume.partition(":")[0] for node in nodes for volume in node["volumes"] if volume.endswith(":/data")]
    assert len(set(disks)) == 2 and set(disks) <= compose["volumes"].keys()
    assert nodes[0]["command"] == nodes[1]["command"] and nodes[0]["environment"] == nodes[1]["environment"]
    (config,) = [one.partition("=")[2] for one in nodes[0]["command"] if one.startswith("--kv-transfer-config=")]
    given = json.loads(config)["kv_connector_extra_config"]
    settings = offloading_settings(given)
    assert settings.disk is not None and settings.disk.remote is not None
    assert settings.disk.remote.url.startswith("s3://pages?endpoint=http://seaweedfs:")
    assert settings.disk.remote.backup == "all" and "--enable-prompt-tokens-details" in nodes[0]["command"]
    (identity,) = json.loads(re.sub(r"\$\{(\w+)[^}]*\}", r"\1", compose["configs"]["s3"]["content"]))["identities"]
    assert identity["credentials"][0]["accessKey"] == nodes[0]["environment"]["AWS_ACCESS_KEY_ID"]
    assert all("127.0.0.1" in port for one in compose["services"].values() for port in one.get("ports", ()))


def test_one_vllm_has_shared_memory_for_its_cpu_tier() -> None:
    """The plug-in takes the settings, and `/dev/shm` has their size. With the commented lines there is a disk, and its
    folder is mounted."""
    path = ROOT / "deploy/vllm.yaml"
    server, other = (yaml.safe_load(text)["services"]["vllm"] for text in (path.read_text(), with_disk(path)))
    assert tiers_of(server["command"])[1] is None and len(other["volumes"]) == len(server["volumes"]) + 2
    cpu_bytes, disk = tiers_of(other["command"])
    assert tiers_of(server["command"])[0] == cpu_bytes <= parse_bytes(server["shm_size"])
    assert disk is not None and any(volume.endswith(f":{disk.path}") for volume in other["volumes"])
    assert all("127.0.0.1" in port for port in server["ports"])


def test_the_pod_of_a_vllm_has_memory_and_a_volume_for_its_tiers() -> None:
    """The pod's `/dev/shm` is memory of the size of the CPU tier, and the memory limit includes it, also with the
    commented lines. With these there is a disk, which is within nine tenths of the volume. The pod does not run as
    root, and all probes ask for `/health`."""
    deployment, service, _ = yaml.safe_load_all(KUBERNETES_VLLM.read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert tiers_of(container["args"])[1] is None
    other, _, claim = yaml.safe_load_all(with_disk(KUBERNETES_VLLM))
    disk = tiers_of(other["spec"]["template"]["spec"]["containers"][0]["args"])[1]
    assert disk is not None
    for spec in (pod, other["spec"]["template"]["spec"]):
        shm = {volume["name"]: volume for volume in spec["volumes"]}["shm"]["emptyDir"]
        resources, cpu_bytes = spec["containers"][0]["resources"], tiers_of(spec["containers"][0]["args"])[0]
        limits = resources["limits"]
        assert shm["medium"] == "Memory" and cpu_bytes <= quantity(shm["sizeLimit"]) < quantity(limits["memory"])
        assert limits["memory"] == resources["requests"]["memory"] and limits["nvidia.com/gpu"] == 1
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"] == "shm" and mounts[str(Path(disk.path).parent)] == "data"
    assert disk.budget <= 0.9 * quantity(claim["spec"]["resources"]["requests"]["storage"])
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")} == {
        "/health"
    }
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def with_disk(path: Path) -> str:
    """The text of a file with its commented lines. A commented value follows the value that it replaces, so the last
    one counts."""
    comment = r"^( *)# (?=- |resources: |requests: )"
    return re.sub(comment, r"\1", path.read_text(), flags=re.MULTILINE)


def tiers_of(arguments: list[str]) -> tuple[int, ServerStoreConfig | None]:
    """The bytes of the CPU tier and the settings of the disk, from the arguments of a vLLM. The model is the first
    argument."""
    assert arguments[0].startswith("/models/")
    *_, config = [one.partition("=")[2] for one in arguments if one.startswith("--kv-transfer-config=")]
    settings = offloading_settings(json.loads(config)["kv_connector_extra_config"])
    assert settings.cpu_bytes_to_use != "free"
    return settings.cpu_bytes_to_use, settings.disk


def quantity(text: str) -> int:
    """The bytes of a size in Kubernetes' units, like 64Gi."""
    return parse_bytes(f"{text}B")


def test_each_alert_has_its_section() -> None:
    """Each alert has a severity, a summary and a link to its section of docs/alerts.md, and reads metrics that hicache
    has. The tests of the plug-ins check the metrics that an alert reads under vLLM and SGLang."""
    page = (ROOT / "docs/alerts.md").read_text()
    assert re.findall(r"^## (\w+)", page, re.MULTILINE) == [rule["alert"] for rule in alerts()]
    pages = (ROOT / f"docs/{name}.md" for name in ("metrics", "no_hits", "integrations/vllm"))
    known = [path.read_text() for path in (*pages, ROOT / "hicache/serving/server/prometheus.py")]
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]
        assert rule["annotations"]["runbook_url"].endswith(f"docs/alerts.md#{rule['alert'].lower()}")
        for metric in re.findall(r"\bhicache_(\w+)", rule["expr"]):
            name = re.sub(r"_(total|bucket)$", "", metric)
            assert any(name in text or name.replace("_", ".", 1) in text for text in known), metric


def test_prometheus_takes_the_alerts_and_raises_them(tmp_path: Path) -> None:
    """`promtool` accepts the rules. The alerts fire for a server that is down, a budget that is exceeded and a drive
    that is written too often. They fire for disks of vLLM and SGLang that fail, and for a vLLM that drops chunks or
    stores none. No other alert fires."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    rules = ROOT / "deploy/alerts.yaml"
    series = {
        'up{job="hicache", instance="a"}': "0x600",
        'up{job="hicache", instance="b"}': "1x600",
        'hicache_tier_used_ratio{tier="disk", instance="b"}': "1.2x600",
        'hicache_tier_used_ratio{tier="disk", instance="c"}': "0.99x600",
        'hicache_disk_drive_writes_per_day{instance="c"}': "3x600",
        'hicache_disk_drive_writes_per_day{instance="b"}': "0.5x600",
        # vLLM: v fails, and drops and computes everything; w stores chunks, and dropped some in the first hour.
        'vllm:hicache_disk_read_only_flag{instance="v", engine="0", store="s"}': "1x600",
        'vllm:hicache_disk_process_state{instance="v", engine="0", store="s"}': "2x600",
        'vllm:hicache_disk_breaker_state{instance="v", engine="0", store="s", direction="read"}': "2x600",
        'vllm:hicache_disk_corrupt_pages_total{instance="v", engine="0", store="s"}': "0+1x600",
        'vllm:hicache_disk_dropped_jobs_total{instance="v", engine="0", store="s"}': "0+1x600",
        'vllm:hicache_disk_put_pages_total{instance="v", engine="0", store="s"}': "0x600",
        'vllm:hicache_missed_tokens_total{instance="v", engine="0", reason="never_stored"}': "0+5000x600",
        'vllm:hicache_disk_dropped_jobs_total{instance="w", engine="0", store="s"}': "0+1x60 60x540",
        'vllm:hicache_disk_put_pages_total{instance="w", engine="0", store="s"}': "0+9x600",
        'vllm:hicache_missed_tokens_total{instance="w", engine="0", reason="never_stored"}': "0+5000x600",
        # SGLang: a store of two ranks fails.
        'hicache_disk_read_only_flag{instance="s", tp_rank="0"}': "0x600",
        'hicache_disk_read_only_flag{instance="s", tp_rank="1"}': "1x600",
    }
    of_vllm = ("StoreReadOnly", "StoreProcess", "BreakerOpen", "CorruptPages", "DroppedStores", "StoresNothing")
    fired = [("HicacheDown", "a"), ("HicacheBudget", "b"), ("HicacheDriveLife", "c"), ("HicacheStoreReadOnly", "s")]
    fired += [(f"Hicache{name}", "v") for name in of_vllm]
    samples = [{"labels": f'{{alertname="{name}", instance="{where}"}}', "value": 1} for name, where in fired]
    query = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "9h", "exp_samples": samples}],
    }
    tests = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(json.dumps(tests))
    for command in (["check", "rules", rules], ["test", "rules", tmp_path / "test.yaml"]):
        done = subprocess.run([promtool, *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_of_the_operator_are_those_of_the_file() -> None:
    """The rules of the operator equal those of the file. `make tables` writes them."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/site/tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.RULES.read_text() == tables.rules(tables.ALERTS.read_text())
    assert loaded(tables.RULES)["spec"] == loaded(tables.ALERTS)
