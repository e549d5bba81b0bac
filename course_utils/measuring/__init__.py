"""The second verb: the memory that a training step really takes, on a GPU, a simulated GPU or the CPU."""

from .comparing import Comparison, compare
from .sources import card_here, choose_source, forced_source, measure

__all__ = ["Comparison", "card_here", "choose_source", "compare", "forced_source", "measure"]
