"""A share of the GPU's memory for processes that run next to each other, each with counters of its own."""

from threading import Condition


class Room:
    """So many GB: who needs some waits until that is free."""

    def __init__(self, gigabytes: float) -> None:
        self.whole = self.free = gigabytes
        self.changed = Condition()

    def take(self, needed: float) -> float:
        """Wait, then take what is needed, at most everything; returns what was taken."""
        needed = min(needed, self.whole)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= needed)
            self.free -= needed
        return needed

    def give(self, taken: float) -> None:
        with self.changed:
            self.free += taken
            self.changed.notify_all()
