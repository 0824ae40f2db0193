"""Make small copies of runs of the demo's model for the repository: ``python tests/plots/shrink_run.py RUN OUT``.

tests/plots/test_figures_of_runs.py draws the figures of docs/en/lab.md from such copies. The copied runs are
real runs of configs/tiny_llama_cpu_fp16.yaml with a hidden size of 32; some of their Parameters and steps are left out.
For gradient_ranges.jsonl, a sample has 32 tokens, and ``layers`` is ``["*.feed_forward"]``.
"""

import json
import sys
from pathlib import Path

KEPT = ("tok_embeddings", "layers.0.attention.wq", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2")
KEPT += ("layers.0.attention_norm", "norm_out", "lm_head")
STEPS = 30


def main(run, out):
    out.mkdir(parents=True, exist_ok=True)
    record = (run / "loss_scale_record.jsonl").read_text().splitlines()
    (out / "loss_scale_record.jsonl").write_text("\n".join(record[:STEPS]) + "\n")
    if (gradients := run / "gradient_ranges.jsonl").exists():
        lines = map(json.loads, gradients.read_text().splitlines())
        (out / gradients.name).write_text("".join(f"{text(line)}\n" for line in lines))
    for probed in run.glob("step_*.json"):
        (out / probed.name).write_text(f"{text(json.loads(probed.read_text()))}\n")
    for file in run.glob("checkpoint/rank_0/*.ckpt"):
        shrink_checkpoint(file, out / "checkpoint" / f"{file.stem}.safetensors")


def text(sweep):
    """Return JSON text of a gradient sweep, with only some of the Parameters."""
    for part in sweep.get("activation_gradients", []):
        del part["overall"]
    for part in (sweep["weights"], *sweep["loss_scales"]):
        del part["overall"]
        part["parameters"] = {
            name: each
            for name, each in part["parameters"].items()
            if any(part_of_name in name for part_of_name in KEPT)
        }
    return json.dumps(sweep, separators=(",", ":"))


def shrink_checkpoint(file, out):
    from mindformers_adaptive.mindformers.checkpoint_arrays import find_checkpoints, read_arrays, save_arrays

    arrays = read_arrays(find_checkpoints(file)[-1])
    out.parent.mkdir(exist_ok=True)
    # Keep only the weights of normalization layers. The names of the optimizer's moments do not begin with "model.", so
    # the copy has no moments.
    save_arrays(out, {name: array for name, array in arrays.items() if name.startswith("model.") and "norm" in name})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
