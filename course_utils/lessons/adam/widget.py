"""A walk down the valley with six controls: optimizer, learning rate, β1, β2, steepness, direction."""

from html import escape

from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, dropdown, slider
from .by_hand import RULES, Point, Valley, trajectory
from .figures import outcome, walks

RATES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.076, 0.08, 0.082, 0.1, 0.2, 0.5, 1.0, 2.0)
BETAS1 = (0.0, 0.2, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
BETAS2 = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999)
LINES = {
    "gradient descent": "θ ← θ − η·g",
    "momentum": "m ← β1·m + g;  θ ← θ − η·m",
    "RMSProp": "v ← β2·v + (1 − β2)·g²;  θ ← θ − η·g/√v",
    "Adam": "m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  θ ← θ − η·m̂/√v̂",
}


class Walker(SliderBox):
    """Controls for a walk down the valley, and its picture. Raises ValueError like `trajectory`."""

    invitation = "Sliders for a walk down the valley: run this cell to use them."

    def __init__(
        self, optimizer: str = "Adam", rate: float = 0.5, beta1: float = 0.9, beta2: float = 0.999
    ) -> None:
        trajectory(optimizer, rate, 1, beta1=beta1, beta2=beta2)
        controls = {
            "optimizer": dropdown("optimizer", RULES, optimizer),
            "rate": slider("learning rate η", RATES, rate, "{:g}".format, continuous=False),
            "beta1": slider("β1 (of m)", BETAS1, beta1, "{:g}".format, continuous=False),
            "beta2": slider("β2 (of v)", BETAS2, beta2, "{:g}".format, continuous=False),
            "steepness": slider("steepness", (1.0, 4.0, 25.0, 100.0, 400.0), 25.0, continuous=False),
            "angle": slider("turned by °", (0.0, 15.0, 30.0, 45.0), 0.0, continuous=False),
        }
        super().__init__(controls)

    @property
    def valley(self) -> Valley:
        """The chosen valley."""
        return Valley(self.controls["steepness"].value, self.controls["angle"].value)

    @property
    def path(self) -> list[Point]:
        """The chosen walk, at most 200 steps."""
        names = ("optimizer", "rate", "beta1", "beta2")
        rule, rate, beta1, beta2 = (self.controls[name].value for name in names)
        return trajectory(rule, rate, 200, beta1=beta1, beta2=beta2, valley=self.valley)

    def redraw(self) -> tuple[Picture, str]:
        """Return the picture of the walk, and the rule with its number of states."""
        name = self.controls["optimizer"].value
        path = self.path
        title = f"{name[0].upper() + name[1:]} at η = {self.controls['rate'].value:g}: {outcome(path)}"
        states = LINES[name].count("← β")  # each moving average is one
        kept = {0: "no state", 1: "one state", 2: "two states"}[states]
        message = f"<code>{escape(LINES[name])}</code> · {kept} per parameter, {4 * states} bytes in fp32"
        return walks({name: path}, title, self.valley), message


walker = Walker
