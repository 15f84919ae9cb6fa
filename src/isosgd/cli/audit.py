"""State what a sampling loop really samples, from a description of it.

Exit status: 0 if nothing is wrong, 3 if there are findings, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from isosgd.diagnostics.audit import Loop, audit

HAS_FINDINGS = 3
DESCRIPTION = (
    "State the tempered posterior that a sampling loop targets, and what is wrong with it. Rules are numbers, or "
    "expressions of lr, N, n (batch size), T and a (1 - momentum). Exit status: 0 if nothing is wrong, 3 if there "
    "are findings, 2 for wrong usage."
)
EPILOG = 'example: isosgd audit --noise "sqrt(2*lr)*0.01" --lr 1e-3 --loss mean --num-data 60000 --weight-decay 5e-4'


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of this command."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    whole: dict[str, Any] = {"type": int, "metavar": "COUNT"}
    real: dict[str, Any] = {"type": float, "metavar": "NUMBER"}
    rule: dict[str, Any] = {"type": _rule, "metavar": "RULE"}
    add = parser.add_argument
    add("--num-data", required=True, **whole, help="N, examples in the data set")
    add("--lr", required=True, **real, help="learning rate")
    add("--noise", **rule, default="0", help='standard deviation added in a step, e.g. "sqrt(2*lr*T/N)" (%(default)s)')
    add("--loss", dest="loss_reduction", choices=("mean", "sum", "full"), help="reduction of the loss (mean)")
    add("--batch-size", **whole, help="n")
    add("--temperature", **rule, help="T that is meant, or how a script sets it, e.g. 1/N (1)")
    add("--weight-decay", **real, help="of the optimizer (0)")
    add("--decoupled", action="store_const", const=True, help="weight decay beside the gradient, as in AdamW")
    add("--prior", **rule, help="factor before the negative log prior in the loss; 1/N is right for a mean loss")
    add("--prior-precision", **real, help="precision of the normal prior that is meant")
    add("--momentum", **real, help="m; the friction a is 1 - m (0)")
    add("--noise-on", choices=("velocity", "parameters"), help="what noise is added to, with momentum (velocity)")
    add("--averaged", action="store_const", const=True, help="the mean of two steps' random numbers is injected")
    add("--momentum-noise", **rule, help="standard deviation of a velocity that is drawn anew")
    add("--refresh-every", **whole, help="steps from one such draw to the next")
    add("--order", choices=("kick", "move"), help="which half of a step comes first (kick)")
    add("--clipping", **real, help="largest norm of a gradient")
    for name in ("augmentation", "batchnorm", "dropout"):
        add(f"--{name}", action="store_const", const=True, help="the loop has it")
    add("--minibatches", choices=("independent", "epoch"), help="epoch: without replacement (independent)")
    add("--shared-noise", choices=("steps", "tensors", "chains"), help="where one random number is used twice")
    add("--reused", **whole, help="steps that share noise (2)")
    add("--replicas", **whole, help="replicas of a data-parallel run with noise of their own (1)")
    add("--gradient-noise", **real, help="variance of the mean loss's gradient over minibatches")
    add("--curvature", **real, help="h of f/N, to reckon with the error of discrete steps")
    parser.add_argument("--measure", action="store_true", help="run the rule on a known posterior as well")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def _rule(text: str) -> float | str:
    """A number where it is one: a temperature of 0.01 is meant, one of 1/N is what a script works out."""
    try:
        return float(text)
    except ValueError:
        return text


def run_audit(args: argparse.Namespace) -> int:
    """Judge the description and print the verdict."""
    given = {name: value for name, value in vars(args).items() if name in Loop.__dataclass_fields__}
    try:
        found = audit(**{name: value for name, value in given.items() if value is not None})
        if args.measure:
            found = found.measure()
    except (ValueError, TypeError) as error:
        print(f"isosgd audit: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    return 0 if found.clean else HAS_FINDINGS
