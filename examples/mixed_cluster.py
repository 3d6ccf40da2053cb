"""One plan over devices of two types, and how much longer a step takes on each type alone.

    python mixed_cluster.py        no GPU is needed

The same on the command line: ahp plan gpt2-xl cluster.yaml, with the groups of this file.
"""

import ahp

GROUPS = (
    {"name": "new", "nodes": 1, "devices_per_node": 2, "device": "H100-SXM-80GB"},
    {"name": "old", "nodes": 1, "devices_per_node": 4, "device": "A100-SXM-80GB"},
)
LINKS = ({"between": ["new", "old"], "gbps": 200},)
JOB = ahp.Job(sequence_length=1024, global_batch_size=256)


def step_s(plan: ahp.Plan) -> float:
    assert plan.forecast is not None  # plans of a search have one
    return plan.forecast.step_time_s


def main() -> None:
    graph = ahp.analyze("gpt2-xl", JOB)
    both = ahp.Cluster.from_dict({"groups": list(GROUPS), "links": list(LINKS)})
    ranking = ahp.search(graph, both, JOB, keep=3)
    print(ranking)
    for group in GROUPS:
        alone = ahp.search(graph, ahp.Cluster.from_dict({"groups": [group]}), JOB, keep=1).best
        times = step_s(alone) / step_s(ranking.best)
        print(f"{group['name']} alone: {alone.parallelism.short()}, {times:.2f} times as long")
    ranking.best.save("plan.yaml")  # ahp explain plan.yaml; ahp train plan.yaml on such nodes


if __name__ == "__main__":
    main()
