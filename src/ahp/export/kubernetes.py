"""``ahp export kubernetes``: a TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1) with the runtime that it needs.

A TrainJob itself cannot set how long pods have to save, when they are started again, or which exit codes end the job; its runtime can. So the
file has both, and the plan in a ConfigMap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from ahp.errors import BadInput, bad_input
from ahp.export.target import Exported, Shape, Source, shape_of
from ahp.optional import OptionalNumber, OptionalText

API = "trainer.kubeflow.org/v1alpha1"
GRACE_S = 300
"""[Empirical] As in slurm.py; Kubernetes' own default is 30 s."""
FOLDER = PurePosixPath("/workspace")
"""Where the claim is mounted; a relative run.folder and job.data are found there."""
PLAN_FOLDER = PurePosixPath("/etc/ahp")
NODE = "node"
"""Name of the job and the container in Kubeflow's torch runtime (manifests/base/runtimes/torch_distributed.yaml)."""
SHARED_MEMORY = "16Gi"
"""[Empirical] A pod has 64 MB by default, and NCCL takes some for each pair of GPUs of a node. Once used it counts as memory of the pod."""
DEVICES = {"MI": "amd.com/gpu"}
"""Resource, keyed by the beginning of the device's name; NVIDIA's if none matches."""


@dataclass(frozen=True)
class Options:
    image: OptionalText = None
    """Needed: an image with Python, torch and ahp, which your cluster can pull."""
    claim: OptionalText = None
    """Needed: a PersistentVolumeClaim that all nodes can write (ReadWriteMany), for the run's folder and what job.data names."""
    name: OptionalText = None
    """Name of the TrainJob; without it one from the file's name."""
    namespace: OptionalText = None
    """Namespace; without it kubectl's."""
    nodes: OptionalText = None
    """Nodes, with a config.yaml; a plan says how many it is for."""
    workers_per_node: OptionalNumber = None
    """With a config.yaml whose cluster is kubernetes or local: GPUs of each node, one for each worker."""
    grace_s: int = GRACE_S
    """Seconds that a pod has to save after SIGTERM."""


class Kubernetes:
    """One pod for each node, each with a launcher; they meet at the address that Trainer gives the first."""

    name = "kubernetes"
    what = "a TrainJob of Kubeflow Trainer v2 with its runtime and the plan: kubectl apply"
    suffix = ".trainjob.yaml"
    options = Options

    def write(self, source: Source, options: Options) -> Exported:
        """The file with its commands. Raises BadInput for missing or invalid options, NotExpressible for a mixed cluster."""
        for key, why in (("image", "an image with torch and ahp"), ("claim", "a claim for the run's folder")):
            if getattr(options, key) is None:
                raise BadInput(f"--{key} missing: pods need {why}, such as --{key} {EXAMPLES[key]}")
        if options.grace_s < 1:
            raise bad_input("--grace-s", options.grace_s, "must be at least 1")
        shape = shape_of(source, options.nodes, options.workers_per_node, self.name)
        if shape.least != shape.most:
            raise bad_input("--nodes", options.nodes, "a TrainJob has one number of nodes", [shape.least, shape.most])
        name = options.name or f"ahp-{re.sub(r'[^a-z0-9]+', '-', source.file.stem.lower()).strip('-') or 'run'}"
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
            rule = f"must be a DNS label of up to {LONGEST_NAME} letters"
            raise bad_input("--name", name, rule, ["ahp-plan"])
        for key, form in FORMS.items():
            value = getattr(options, key)
            if value is not None and not re.fullmatch(form, value):
                raise bad_input(f"--{key}", value, "is not a valid Kubernetes name", [EXAMPLES[key]])
        documents = [_plan(source, name), _runtime(source, options, shape, name), _job(options, shape, name)]
        for document in documents:
            if options.namespace is not None:
                document["metadata"]["namespace"] = options.namespace
        head = HEAD.format(
            source=source.file,
            nodes=f"{shape.most} node{'s' * (shape.most > 1)}",
            workers=shape.workers,
            claim=options.claim,
        )
        body = "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False) for document in documents)
        where = f" -n {options.namespace}" if options.namespace else ""
        return Exported(head + body, ("kubectl apply -f {file}", f"kubectl logs -f{where} -l {LABEL}={name}"))


EXAMPLES = {"image": "registry.example.com/ahp:1", "claim": "runs", "namespace": "default"}
FORMS = {"image": r"\S+", "claim": r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "namespace": r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"}
LONGEST_NAME = 40
"""Most letters: a pod's name, of at most 63 letters, has the job's number and more after it."""
LABEL = "jobset.sigs.k8s.io/jobset-name"
HEAD = """\
# Trains {source} on {nodes} of {workers} workers, by Kubeflow Trainer v2. Written by ahp export kubernetes; yours to change.
# The claim {claim} holds the run's folder, so that pods that are started again go on from the newest checkpoint.
"""


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as YAML blocks, and no anchors or aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _plan(source: Source, name: str) -> dict[str, Any]:
    """The plan or config, as the pods read it."""
    text = source.file.read_text(encoding="utf-8") if source.file.is_file() else (source.file / "plan.yaml").read_text()
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {_file(source): text}}


def _file(source: Source) -> str:
    return "plan.yaml" if source.plan is not None else "config.yaml"


def _runtime(source: Source, options: Options, shape: Shape, name: str) -> dict[str, Any]:
    """How the nodes of this job are run: Kubeflow's torch-distributed with a volume, time to save, and what exit codes mean."""
    pod = {
        "restartPolicy": "Never",  # the Job makes a new pod, by the rules of its podFailurePolicy
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [_container(source, options, shape)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "plan", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        ],
    }
    job = {
        "backoffLimit": source.run.elastic.max_restarts * shape.most,
        "podFailurePolicy": {
            "rules": [
                # Refused: bad input, nothing fits, other hardware, not expressible. A new start would be refused again.
                {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": [2, 3, 4, 5]}},
                # Evicted, preempted, its node drained: not a failure of the job.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    replicated = {
        "name": NODE,
        "template": {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, "spec": job},
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": shape.most, "torch": {}},
            "template": {"spec": {"replicatedJobs": [replicated]}},
        },
    }


def _container(source: Source, options: Options, shape: Shape) -> dict[str, Any]:
    folder = PurePosixPath(source.run.folder)
    train = (
        f"exec ahp train {PLAN_FOLDER / _file(source)} --run.folder {folder} \\\n"
        f"  --nodes {shape.most} --workers-per-node {shape.workers} "
        '--rendezvous "$PET_MASTER_ADDR:$PET_MASTER_PORT"\n'
    )
    return {
        "name": NODE,
        "image": options.image,
        "workingDir": str(FOLDER),
        # exec: Kubernetes' SIGTERM goes to the first process of the container.
        "command": ["bash", "-c", f"{WAIT}{train}"],
        "volumeMounts": [
            {"name": "runs", "mountPath": str(FOLDER)},
            {"name": "plan", "mountPath": str(PLAN_FOLDER), "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


WAIT = """\
# The name of the first pod has an address when that pod is placed.
until getent hosts "$PET_MASTER_ADDR" >/dev/null; do sleep 1; done
"""


def _job(options: Options, shape: Shape, name: str) -> dict[str, Any]:
    kind = next((resource for word, resource in DEVICES.items() if shape.device.startswith(word)), "nvidia.com/gpu")
    wanted = {kind: str(shape.gpus)} if shape.gpus else {"cpu": str(shape.workers)}
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {
                "image": options.image,
                "numNodes": shape.most,
                "numProcPerNode": shape.workers,
                "resourcesPerNode": {"requests": wanted, "limits": wanted},
            },
        },
    }
