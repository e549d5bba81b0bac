"""The card that is not there counts as a real one does."""

import pytest
import torch
from stand_in import LimitedMemory


def test_the_stand_in_counts_what_lives_and_fails_when_it_is_full():
    with LimitedMemory(10_000) as memory:
        first = torch.ones(1000)
        view = first[10:]
        assert memory.allocated == 4096  # in blocks of 512 bytes, a view for nothing
        del first
        assert memory.allocated == 4096
        del view
        assert memory.allocated == 0 and memory.peak == 4096
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 0\.01 MiB.*is free"):
            torch.ones(3000)
