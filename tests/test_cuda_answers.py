"""Answers of a simulated GPU to questions that torch.cuda takes, or a clear message where it has none."""

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from course_utils.errors import StepError
from course_utils.gpus import GPUS, Gpu
from course_utils.measuring.cuda_answers import CARD, REFUSED, Memory, answered
from course_utils.measuring.simulated import simulated_gpu


@contextmanager
def asked(events: Callable[[], list[tuple[int, str]]] = list, card: Gpu = CARD):
    """A simulated GPU that answers."""
    with simulated_gpu("auto", card=card), answered(Memory(events, card)):
        yield


def test_what_needs_a_real_gpu_says_so_with_the_line():
    names = [name for name in REFUSED if hasattr(torch.cuda, name)]
    assert names
    for name in names:
        with asked(), pytest.raises(StepError) as caught:
            getattr(torch.cuda, name)()
        said = str(caught.value)
        assert said.startswith("test_cuda_answers.py:")
        assert f"no answer to torch.cuda.{name}(). Leave this out" in said


def test_the_card_says_what_it_is():
    with asked():
        assert torch.cuda.get_device_name() == "simulated GPU" and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability(torch.ones(1, device="cuda").device) == (8, 0)
        assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported()
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor, properties.total_memory) == (8, 0, CARD.room)
        assert torch.cuda.get_arch_list() == ["sm_80"]
        assert torch.accelerator.current_accelerator() == torch.device("cuda")


@pytest.mark.parametrize("card", GPUS.values(), ids=str)
def test_a_named_card_answers_for_itself(card):
    with asked(card=card):
        assert torch.cuda.get_device_name(0) == card.name
        assert torch.cuda.get_device_capability() == card.capability
        seen = torch.cuda.get_device_properties("cuda")
        assert (seen.total_memory, seen.multi_processor_count) == (card.room, card.processors)
        assert torch.cuda.mem_get_info() == (card.room, card.room)
        # as torch.cuda.is_bf16_supported: a tensor can be made on every card, arithmetic came with Ampere
        assert torch.cuda.is_bf16_supported()
        modern = card.capability[0] >= 8
        assert torch.cuda.is_bf16_supported(including_emulation=False) is modern
        assert torch.cuda.is_tf32_supported() is modern
        q = torch.empty(1, 2, 64, 32, dtype=torch.float16, device="cuda", requires_grad=True)
        kernel = torch.nn.functional.scaled_dot_product_attention(q, q, q).grad_fn
        assert ("Efficient" in str(kernel)) is not modern


def test_streams_events_and_random_numbers_do_nothing():
    with asked():
        torch.cuda.manual_seed_all(3)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        side = torch.cuda.Stream()
        event = torch.cuda.Event(enable_timing=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.device(0), torch.cuda.stream(side), torch.cuda.nvtx.range("a part"):
            x = torch.ones(4, device="cuda")
            x.record_stream(side)
            event.record()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert event.query() and isinstance(side, torch.cuda.Stream) and not side.is_capturing()
        assert not torch.cuda.is_current_stream_capturing()
        with pytest.raises(StepError, match="events measure no time"):
            event.elapsed_time(torch.cuda.Event())


def test_memory_is_what_the_allocator_makes_of_what_has_been_counted_so_far():
    events = [(1024, "a")]
    MiB = 1 << 20
    with asked(lambda: events):
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated("cuda") == 1024
        events += [(4096, "b"), (-4096, "b")]
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (1024, 5120)
        torch.cuda.reset_peak_memory_stats()
        events += [(512, "c")]
        assert torch.accelerator.max_memory_allocated() == 1536
        assert torch.cuda.memory_reserved() == 2 * MiB  # the first segment of the small pool
        assert torch.cuda.mem_get_info() == (CARD.room - 2 * MiB, CARD.room)
        said = torch.cuda.memory_stats()
        assert said["allocated_bytes.all.peak"] == 1536
        assert said["inactive_split_bytes.all.current"] == 2 * MiB - 1536
        assert said["requested_bytes.all.current"] == said["requested_bytes.all.peak"] == 1536
        events += [(-1024, "a"), (-512, "c")]
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0 and torch.cuda.max_memory_reserved() == 2 * MiB
    assert Memory(list).followed().allocator.allocated == 0


def test_an_event_that_is_taken_back_leaves_an_earlier_empty_cache():
    first, second = ["a"], ["b"]
    events = [(1024, first), (-1024, first)]
    memory = Memory(lambda: events)
    memory.empty_cache()
    events += [(2048, second), (2048, ["c"])]
    assert memory.followed().allocator.reserved == 2 * 2**20
    events[3:] = [(-2048, second)]
    assert memory.followed().allocator.allocated == 0
    assert memory.allocator.reserved == 2 * 2**20
    assert memory.emptied == [2]
    assert len(memory.allocator.driver_calls) == 3
