"""Queues that wait for each other, and messages that share a link."""

import random

import pytest

from titan_ext.plan.streams import Streams, Work


def _message(streams: Streams, queue: str, ms: float, *, link: str = "node") -> Work:
    return streams.add(queue, Work(0.0, link=link, on_link_ms=ms))


def test_a_queue_is_in_order_and_waits_for_others():
    streams = Streams()
    a = streams.add("compute", Work(3.0))
    streams.wait("copies", [a], "a")
    b = streams.add("copies", Work(2.0))
    streams.add("compute", Work(1.0))
    streams.wait("compute", [b], "b")
    last = streams.add("compute", Work(1.0))
    streams.run()
    assert b.end == 5
    assert last.end == 6
    assert list(streams.waits(last)) == [("b", 1.0)]


def test_two_messages_share_a_link_and_take_twice_as_long():
    streams = Streams()
    both = [_message(streams, queue, 10.0) for queue in ("gathers", "exchanges")]
    other = _message(streams, "network", 10.0, link="network")
    streams.run()
    assert [item.end for item in both] == [20, 20]
    assert other.end == 10


def test_a_short_message_passes_a_long_one():
    """And the long one ends later by what the short one took."""
    streams = Streams()
    long = _message(streams, "gathers", 100.0)
    streams.wait("exchanges", [streams.add("compute", Work(30.0))])
    short = _message(streams, "exchanges", 1.0)
    streams.run()
    assert short.end == 32
    assert long.end == 101


def test_one_communicator_is_in_order():
    streams = Streams()
    first, second = (_message(streams, "exchanges", ms) for ms in (10.0, 1.0))
    streams.run()
    assert (first.end, second.end) == (10, 11)


def test_what_begins_when_a_message_ends_shares_from_then_on():
    streams = Streams()
    a, b = _message(streams, "a", 10.0), _message(streams, "b", 30.0)
    streams.wait("compute", [a])
    streams.add("compute", Work(5.0))
    streams.wait("c", streams.last("compute"))
    c = _message(streams, "c", 5.0)
    streams.run()
    assert a.end == 20  # half of the link each
    assert c.end == 35  # b alone from 20 to 25, half each from there
    assert b.end == 45  # which is all that was sent


def test_a_link_is_never_idle_and_never_sends_more_than_it_can():
    """Whatever arrives: the last of some messages ends when all have been sent."""
    seeded = random.Random(0)
    for _ in range(50):
        streams, total = Streams(), 0.0
        for queue in range(6):
            for _ in range(seeded.randrange(1, 4)):
                ms = seeded.uniform(0.1, 9.0)
                total += ms
                _message(streams, str(queue), ms)
        streams.run()
        last = max(work.end or 0.0 for works in streams.queues.values() for work in works)
        assert last == pytest.approx(total)


def test_queues_that_wait_for_each_other_are_an_error():
    streams = Streams()
    b = Work(1.0, queue="b", index=0)
    streams.wait("a", [b])
    streams.wait("b", [streams.add("a", Work(1.0))])
    streams.add("b", b)
    with pytest.raises(AssertionError, match="wait for each other"):
        streams.run()
