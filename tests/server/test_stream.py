"""The websocket: what a client gets, what it may send, and what it costs the others."""

import asyncio
import gc
import logging
import socket
import threading
import time
import tracemalloc
from pathlib import Path

import psutil
from waiting import ANSWER_S, becomes

import gpumagic
from gpumagic.telemetry import GpuSample, ProcessSample
from gpumagic.telemetry.history import CellRun

MIB = 2**20


def no_thread():
    return not any("gpumagic" in thread.name for thread in threading.enumerate())


def periods(hub):
    return [client.subscription.period_s for client in hub.clients]


async def test_a_snapshot_comes_at_once_and_then_at_each_tick(machine, connect):
    client = await connect()
    first = await client.hear()
    assert first["snapshot"]["gpus"][0]["uuid"] == "GPU-0"
    await client.want(period=0.25)
    times = [(await client.hear())["snapshot"]["time"] for _ in range(3)]
    assert times == sorted(set(times))


async def test_who_joins_has_kernels_measured_on_no_event_loop(
    machine, hub, connect, fetch, monkeypatch
):
    measured, add_to = [], hub.deaths.add_to
    monkeypatch.setattr(
        hub.deaths, "add_to", lambda found: measured.append(threading.get_ident()) or add_to(found)
    )
    await fetch("snapshot")  # a young one, which no page has
    await (await connect()).hear()
    assert len(measured) >= 2
    assert threading.get_ident() not in measured


async def test_processes_are_asked_for_only_while_somebody_wants_them(machine, hub, connect):
    machine.processes = (ProcessSample("GPU-0", 4242, 7),)
    client = await connect()
    assert (await client.hear())["snapshot"]["processes"] == []
    await client.want(period=0.25, processes=True)
    await client.hear(until=lambda message: message["snapshot"]["processes"])
    await client.want(processes=False)
    await client.hear(until=lambda message: not message["snapshot"]["processes"])


async def test_a_period_out_of_bounds_is_clamped(machine, hub, connect):
    client = await connect()
    for asked, given in ((0, 0.25), (0.3, 0.3), (-5, 0.25), (1e9, 60.0)):
        await client.want(period=asked)
        await becomes(lambda given=given: periods(hub) == [given])


async def test_the_past_is_sent_when_it_is_asked_for(machine, hub, connect):
    hub.cells.keep(CellRun("a", "k", "a.ipynb", 1, time.time()))
    client = await connect()
    await client.hear()
    await client.want(since=None)
    past = await client.hear("history")
    assert past["history"]["time"] == [1001.0]
    assert [cell["id"] for cell in past["cells"]] == ["a"]
    await client.want(since=1001.0)
    assert (await client.hear("history"))["history"]["time"][:1] != [1001.0]


async def test_the_history_survives_when_nobody_watches(machine, hub, connect):
    client = await connect()
    await client.hear()
    client.close()
    await becomes(lambda: not hub.clients)
    again = await connect()
    await again.want(since=None)
    assert (await again.hear("history"))["history"]["time"][0] == 1001.0


async def test_news_of_cells_comes_unasked(machine, hub, connect):
    client = await connect()
    await client.hear()
    run = CellRun("a", "k", "a.ipynb", 3, 5.0)
    hub.cells.keep(run)
    assert (await client.hear("cells"))["cells"] == [
        {"id": "a", "kernel": "k", "notebook": "a.ipynb", "count": 3}
        | {"start": 5.0, "end": None, "gpus": []}
    ]


MALFORMED = (
    "",
    "null",
    "[]",
    "{",
    "[" * 4000,
    '{"type": "want", "period": "fast"}',
    '{"type": "want", "period": NaN}',
    '{"type": "want", "processes": 1}',
    '{"type": "want", "since": []}',
    '{"type": "other"}',
    "\x00",
)


async def test_what_is_malformed_is_ignored_and_nothing_is_lost(machine, hub, connect):
    client = await connect()
    await client.hear()
    for text in MALFORMED:
        await client.connection.write_message(text)
    await client.connection.write_message(b'{"type": "want", "period": 0.5}', binary=True)
    await client.want(period=0.25, since=None)
    await client.hear("history")
    assert periods(hub) == [0.25]


async def test_many_clients_cost_the_driver_what_one_does(machine, hub, connect):
    async def takes_in_a_while(clients):
        for client in clients:
            await client.hear()
            await client.want(period=0.25)
        await becomes(lambda: set(periods(hub)) == {0.25})
        before = machine.takes
        for _ in range(4):
            await asyncio.gather(*(client.hear() for client in clients))
        return machine.takes - before

    one = [await connect()]
    alone = await takes_in_a_while(one)
    together = await takes_in_a_while([*one, *[await connect() for _ in range(30)]])
    # A tick more or less, as the clock has it.
    assert abs(together - alone) <= 2
    assert len(machine.threads) == 1


async def test_the_driver_is_never_asked_on_the_event_loop(machine, fetch, connect):
    client = await connect()
    await client.hear()
    for route in ("snapshot", "history"):
        await fetch(route)
    assert threading.get_ident() not in machine.threads


async def test_a_stalled_driver_leaves_the_stream_alive(machine, connect):
    client = await connect()
    await client.want(period=0.25)
    await client.hear()
    machine.answers.clear()
    stalled = await client.hear(until=lambda message: message["snapshot"]["problems"])
    assert stalled["snapshot"]["problems"][0]["code"] == "stalled"
    assert stalled["snapshot"]["gpus"][0]["age"] > 0
    again = await client.hear(until=lambda message: message["snapshot"]["problems"])
    assert again["snapshot"]["gpus"][0]["age"] > stalled["snapshot"]["gpus"][0]["age"]
    machine.answers.set()
    await client.hear(until=lambda message: not message["snapshot"]["problems"])


async def test_a_driver_that_stalls_from_the_start_is_told_too(machine, connect):
    machine.answers.clear()
    client = await connect()
    assert (await client.hear())["snapshot"]["problems"][0]["code"] == "stalled"
    machine.answers.set()


async def test_a_slow_client_gets_the_newest_and_no_queue(
    machine, hub, connect, dial, jp_serverapp, jp_http_port, jp_base_url, http_server
):
    # One snapshot is larger than what the system keeps for a client that does not read.
    machine.gpus = tuple(GpuSample(f"GPU-{n}", "x" * 1000) for n in range(300))
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(link, ("127.0.0.1", jp_http_port))
    token = jp_serverapp.identity_provider.token
    head = (
        f"GET {jp_base_url}gpumagic/api/stream HTTP/1.1\r\nHost: localhost:{jp_http_port}\r\n"
        f"Authorization: token {token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await loop.sock_sendall(link, head.encode())
    quick = await connect()
    await quick.want(period=0.25)
    newest = 0
    for _ in range(12):
        newest = (await quick.hear())["snapshot"]["time"]
    assert newest >= 1010
    received = bytearray()
    while received.count(b'{"type":"snapshot"') < 3:
        part = await asyncio.wait_for(loop.sock_recv(link, 2**20), ANSWER_S)
        assert part
        received += part
    times = [float(part.split(b",")[0]) for part in bytes(received).split(b'"time": ')[1:]]
    # The one that was under way, and then what is new now, within its own period of a second.
    assert times[0] <= 1002
    assert times[1] >= newest - 5
    link.close()


async def test_a_hundred_sockets_opened_and_cut_leave_nothing(
    machine, hub, connect, jp_serverapp, jp_http_port, jp_base_url
):
    hub.refresh_s = 0.05
    # What a test has logged is kept in memory.
    jp_serverapp.log.setLevel(logging.WARNING)
    process = psutil.Process()
    token = jp_serverapp.identity_provider.token
    head = (
        f"GET {jp_base_url}gpumagic/api/stream HTTP/1.1\r\nHost: localhost:{jp_http_port}\r\n"
        f"Authorization: token {token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()

    async def cut(count):
        for n in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", jp_http_port)
            if n % 5 == 0:
                # Within its first words, or before it can have an answer.
                writer.write(head[: -1 - n % 2])
                await writer.drain()
                writer.transport.abort()
                continue
            writer.write(head)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_S)
            if n % 3:
                # Some read a snapshot before they go, and some ask for the past.
                await asyncio.wait_for(reader.readuntil(b'"type":"snapshot"'), ANSWER_S)
            # Cut, without a word.
            writer.transport.abort()
        await becomes(lambda: not hub.clients and not hub.tasks)
        await becomes(
            lambda: not any("gpumagic" in thread.name for thread in threading.enumerate())
        )
        gc.collect()
        return process.num_fds(), len(asyncio.all_tasks()), threading.active_count()

    # What other threads of this process allocate, left by other tests, is not counted.
    ours = tracemalloc.Filter(True, f"{Path(gpumagic.__file__).parent}/*", all_frames=True)

    def held():
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)

    before = await cut(15)
    tracemalloc.start(4)
    try:
        await cut(25)
        grown = -held()
        after = await cut(60)
        grown += held()
    finally:
        tracemalloc.stop()
    assert after == before
    assert grown < MIB, grown


async def test_when_the_server_stops_nothing_is_left(machine, hub, connect, jp_serverapp):
    clients = [await connect() for _ in range(5)]
    for client in clients:
        await client.want(since=None)
        await client.hear()
    await jp_serverapp.extension_manager.stop_all_extensions()
    await becomes(no_thread)
    assert not [t for t in asyncio.all_tasks() if "gpumagic" in repr(t.get_coro())]
    await connect()
    assert not hub.clients


async def test_the_base_url_is_the_servers(machine, connect, jp_base_url):
    assert jp_base_url == "/a%40b/"
    client = await connect()
    await client.hear()
