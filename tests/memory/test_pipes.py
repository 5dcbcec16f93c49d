"""Index pipes: whole messages in order, whoever writes and however the writer ends."""

import contextlib
import os
import struct
import subprocess
import sys

import pytest

from sf_torchrl.memory.pipes import PipeClosedError, PipeReader, PipeWriter, index_pipe


@pytest.fixture
def pipe():
    reader, writer = index_pipe()
    yield reader, writer
    for end in (reader, writer):
        with contextlib.suppress(OSError):  # the test has closed it
            end.close()


WRITE = """
import os, sys
from sf_torchrl.memory.pipes import PipeWriter
fd, name, count = map(int, sys.argv[1:])
pipe = PipeWriter(fd)
i = 0
while count < 0 or i < count:
    pipe.send(name, i, -i, name + i)
    i += 1
"""


def everything(reader):
    """Messages until no writer is left, as they come."""
    while True:
        try:
            yield from reader.receive()  # raises struct.error if a message was cut
        except PipeClosedError:
            return


def start_writer(writer, name, count):
    arguments = [sys.executable, "-c", WRITE, str(writer.fd), str(name), str(count)]
    return subprocess.Popen(arguments, pass_fds=[writer.fd])


def test_messages_arrive_as_they_were_sent(pipe):
    reader, writer = pipe
    writer.send(1, -2, 2**31 - 1, -(2**31))
    assert list(reader.receive()) == [(1, -2, 2**31 - 1, -(2**31))]


def test_what_is_not_said_is_zero(pipe):
    reader, writer = pipe
    writer.send(7)
    assert list(reader.receive()) == [(7, 0, 0, 0)]


def test_one_read_takes_everything_that_waits_oldest_first(pipe):
    reader, writer = pipe
    for i in range(4000):
        writer.send(i)
    assert [a for a, *_ in reader.receive()] == list(range(4000))
    writer.send(-1)
    assert list(reader.receive()) == [(-1, 0, 0, 0)]


def test_a_number_that_does_not_fit_is_refused_and_nothing_is_sent(pipe):
    reader, writer = pipe
    with pytest.raises(struct.error):
        writer.send(2**31)
    writer.send(5)
    assert list(reader.receive()) == [(5, 0, 0, 0)]


def test_a_closed_pipe_gives_what_waits_and_then_says_that_it_is_closed(pipe):
    reader, writer = pipe
    writer.send(1)
    writer.close()
    assert list(reader.receive()) == [(1, 0, 0, 0)]
    with pytest.raises(PipeClosedError):
        reader.receive()


def test_a_pipe_is_open_until_its_last_writer_has_gone(pipe):
    reader, writer = pipe
    other = PipeWriter(os.dup(writer.fd))
    writer.close()
    other.send(2)
    assert list(reader.receive()) == [(2, 0, 0, 0)]
    other.close()
    with pytest.raises(PipeClosedError):
        reader.receive()


def test_writing_to_nobody_is_an_error(pipe):
    reader, writer = pipe
    reader.close()
    with pytest.raises(PipeClosedError):
        writer.send(1)


def test_ends_are_not_inherited_by_programs_that_do_not_ask(pipe):
    assert not any(os.get_inheritable(end.fd) for end in pipe)


@pytest.mark.multiprocess
def test_messages_of_two_processes_never_mix_and_keep_their_order(pipe):
    reader, writer = pipe
    count = 30_000  # seven times what the pipe holds
    children = [start_writer(writer, name, count) for name in (1_000_000, 2_000_000)]
    writer.close()
    received = {1_000_000: [], 2_000_000: []}
    for name, i, minus_i, total in everything(reader):
        assert (minus_i, total) == (-i, name + i)
        received[name].append(i)
    assert all(numbers == list(range(count)) for numbers in received.values())
    assert [child.wait() for child in children] == [0, 0]


@pytest.mark.multiprocess
def test_a_writer_killed_at_full_speed_leaves_only_whole_messages(pipe):
    reader, writer = pipe
    child = start_writer(writer, 5, -1)
    writer.close()
    received = []
    for message in everything(reader):
        received.append(message)
        if len(received) == 20_000:
            child.kill()
    assert received == [(5, i, -i, 5 + i) for i in range(len(received))]
    child.wait()


def test_a_death_notice_is_nothing_that_an_env_could_raise_by_itself():
    assert not issubclass(PipeClosedError, (EOFError, OSError))


def test_ends_are_values_that_name_their_descriptor():
    assert PipeReader(3) == PipeReader(3)
    assert PipeWriter(3) != PipeWriter(4)
