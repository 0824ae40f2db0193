"""Compare three rules of loss scaling in three situations: by the result, the skipped steps and the time of a step.

    python -m scripts.studies.three_rules [--again NAME] [--json FILE]

The ceiling of a step is the largest loss scale at which nothing in it overflows. This script trains the situation whose
ceiling moves: a small network whose loss weighs 2^12 times as much for 100 steps. All rules start from 2^16, from the
same weights and with the same data. Prints Markdown, and draws docs/images/three_rules.svg, the loss scales of the
rules in the first training.

The other figures in the table come from other scripts: scripts/studies/long_training.py has trainings with a steady
ceiling, scripts/studies/low_start.py trainings from a loss scale that is far too low, and scripts/benchmarks/costs.py
the time of a step.
"""

import json
import sys

import numpy as np

from mindformers_adaptive.plots import canvas
from scripts.benchmarks import costs
from scripts.studies import long_training, low_start
from scripts.studies.reporting import ROOT, output_to_stderr, report, study_parser, use_one_thread
from scripts.studies.worth_report import interval, mean_and_interval

PICTURE = "docs/images/three_rules.svg"
DATA = ROOT / "docs" / "figures" / "three_rules.json"
# The extra time of a step by rule, in percent of a step with MindSpore's dynamic cell: see scripts/benchmarks/costs.py.
STEP_TIMES = ROOT / "docs" / "figures" / "step.json"

# For each rule, its name in the table, its name in STEP_TIMES, and its colour in the picture. MindFormers' adaptive
# cell takes the same steps as ours from the same start: see scripts/studies/worth_it.py.
RULES = {
    "dynamic": ("dynamic, window 1000", costs.DYNAMIC, canvas.WARNING),
    "adaptive": ("adaptive", costs.ADAPTIVE, canvas.MAIN),
    "guided": ("gradient-guided", costs.GUIDED, canvas.SECOND),
}
START = 2.0**16
SEEDS, STEPS, LOOK_EVERY = 10, 600, 10


def main():
    parser = study_parser(__doc__, PICTURE)
    parser.add_argument("--again", metavar="NAME", help="train only by rules that have this in their names")
    arguments = parser.parse_args()
    again = arguments.again or ""
    moves = {} if not again else json.loads(DATA.read_text(encoding="utf-8"))["moves"]
    with output_to_stderr():
        use_one_thread()
        for rule in [rule for rule in RULES if again in rule]:
            moves[rule] = train(rule)
    result = {"moves": moves}
    report(arguments, result, tables(result), canvas.save(draw(moves), arguments.picture))


def train(rule):
    """Train the network whose ceiling moves by a rule; return a summary for each seed, with the path of the first."""
    from scripts.studies.worth_tasks import task_of
    from scripts.studies.worth_training import Trainings, divided

    trainings, summaries = Trainings(task_of("moving", {})), []
    for seed in range(SEEDS):
        print(f"{rule}, seed {seed}", file=sys.stderr, flush=True)
        # Only the first run is drawn with its ceilings, which take longer to measure than the steps.
        trainings.look_every = STEPS if seed else LOOK_EVERY
        run = trainings.run(divided(rule, START, 1), seed, STEPS)
        summaries.append({"quality": run["quality"], "steps": STEPS, "skipped": len(run["skipped"])})
        if not seed:
            looks = [look for look in run["looks"] if look.get("ceiling")]
            ceilings = [[look["step"], float(np.log2(look["ceiling"]))] for look in looks]
            path = {"exponents": np.log2(run["scales"]).tolist(), "skipped_steps": run["skipped"], "ceilings": ceilings}
            summaries[-1] |= path
    return summaries


def tables(result):
    """Return the only table of a result, as {name: rows}; the first row has the names of the columns."""
    steady = long_training.whole_runs(long_training.RESULTS, long_training.STEPS)
    low = json.loads(low_start.DATA.read_text(encoding="utf-8"))
    moves = result["moves"]
    fp32, fitting = (
        np.mean(qualities) for qualities in (ends(steady["fp32"]), low_start.qualities(low, low_start.FITTING))
    )
    measured = {
        ("steady ceiling", f"loss, FP32: {fp32:.3f}"): differences({rule: ends(steady[rule]) for rule in RULES}),
        ("", f"skipped of {long_training.STEPS:,} steps"): means(steady, lambda run: len(run["skipped"])),
        ("ceiling that moves", "R², at best 1"): differences(
            {rule: np.array([run["quality"] for run in moves[rule]]) for rule in RULES}
        ),
        ("", f"skipped of {moves['dynamic'][0]['steps']:,} steps"): means(moves, lambda run: run["skipped"]),
        ("far too low", f"loss, from a scale that fits: {fitting:.3f}"): differences(
            {rule: low_start.qualities(low, rule) for rule in RULES}
        ),
        ("", "steps until the scale fits"): [low_start.back(low, rule) for rule in RULES],
        ("", f"loss scale after {low['steps']} steps"): [low_start.reached(low, rule) for rule in RULES],
        ("any situation", "extra time of a step"): step_times(),
    }
    rows = [["situation", "measured", *(name for name, *_ in RULES.values())]]
    rows += [[*names, *cells] for names, cells in measured.items()]
    return {"rules": rows}


def ends(runs):
    return np.array([run["looks"][-1]["quality"] for run in runs])


def means(runs, figure):
    return [f"{np.mean([figure(run) for run in runs[rule]]):.1f}" for rule in RULES]


def differences(by_rule):
    """Return, for each rule, its mean result with the difference from dynamic scaling, paired by seed."""
    cells = [f"{by_rule['dynamic'].mean():.3f}"]
    for rule in list(RULES)[1:]:
        difference = mean_and_interval(by_rule[rule] - by_rule["dynamic"])
        cells.append(f"{by_rule[rule].mean():.3f} ({interval(difference, 3)})")
    return cells


def step_times():
    """Return the extra time of a step for each rule, in percent of a step with MindSpore's dynamic cell."""
    times = dict(costs.tables(json.loads(STEP_TIMES.read_text(encoding="utf-8")))["extra"][1:])
    return [f"{times[timed]} %" for _, timed, _ in RULES.values()]


def draw(by_rule):
    """Draw the loss scale of each rule in the first run of the training whose ceiling moves."""
    figure = canvas.new_figure(9, 5.6)
    panels = figure.subplots(len(by_rule), 1, sharex=True, sharey=True)
    for axes, (rule, runs) in zip(panels, by_rule.items(), strict=True):
        run, (name, _, colour) = runs[0], RULES[rule]
        exponents, numbers = np.array(run["exponents"]), np.array(run["skipped_steps"], int)
        looked_at, ceilings = np.array(run["ceilings"]).T
        top = ceilings.max() + 2
        axes.fill_between(looked_at + 1, ceilings, top, color=canvas.CONTEXT, linewidth=0, label="overflows here")
        axes.step(np.arange(1, len(exponents) + 1), exponents, where="post", color=colour, linewidth=1.6)
        axes.plot(numbers + 1, exponents[numbers], "x", color="black", markersize=5, label="skipped step")
        title = f"{name}: {run['skipped']} of {run['steps']} steps skipped"
        canvas.style_axes(axes, title=title, y_label="loss scale, log2")
        axes.set_ylim(min(exponents.min(), ceilings.min()) - 1, top)
    panels[0].set_xlim(1, run["steps"])
    panels[0].legend(loc="lower right", fontsize=9, framealpha=1)
    panels[-1].set_xlabel("step")
    canvas.headline(figure, "One training by three rules: the loss weighs 2^12 times as much in steps 201 to 300")
    return figure


if __name__ == "__main__":
    main()
