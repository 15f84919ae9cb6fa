"""What a report is about, in the user's words and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Subject:
    """Names and units for a report; everything has a default.

    Attributes:
        title: of the page.
        target: what is predicted.
        inputs: names of the inputs.
        classes: names of the classes, in the order of their numbers.
        y_mean: added to predictions that are multiplied by ``y_scale``, to have them in the units of the data.
        y_scale: units of the data for one unit of the model.
        x_mean: of a single input, likewise.
        x_scale: of a single input.
        layers: what to call layers, such as ``{"0": "hidden layer"}``.
        network: the model in words.
        notes: what else a reader should know, one sentence each: how the table was read, for instance.
        commands: what to run to have the draws and this report again.
        outside: what the inputs out of distribution are.
        longer: a command that runs longer, shown when that is the verdict.
    """

    title: str = "Posterior report"
    target: str = "y"
    inputs: Sequence[str] = ()
    classes: Sequence[str] = ()
    y_mean: float = 0.0
    y_scale: float = 1.0
    x_mean: float = 0.0
    x_scale: float = 1.0
    layers: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()
    outside: str = "inputs out of distribution"
    longer: str = ""

    def layer(self, name: str) -> str:
        """What to call a layer."""
        return self.layers.get(name, name)

    def named(self, text: str) -> str:
        r"""A text in which names of layers are what to call them, where they are quoted or begin a line.

        Example:
            >>> print(Subject(layers={"0": "hidden layer"}).named("Temperature 1.\n  0: 1.01 ± 0.02"))
            Temperature 1.
              hidden layer: 1.01 ± 0.02
        """
        for name, word in self.layers.items():
            text = text.replace(f"{name!r}", f"'{word}'").replace(f"\n  {name}: ", f"\n  {word}: ")
        return text


@dataclass(frozen=True)
class Figure:
    """A plot with its title and what to see in it; one that is wide has another drawing for narrow screens."""

    title: str
    svg: str
    caption: str = ""
    narrow: str = ""


@dataclass(frozen=True)
class Tile:
    """A number that stands out: what it is, its value, and a word about it."""

    label: str
    value: str
    note: str = ""
