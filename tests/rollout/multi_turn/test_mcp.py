"""Tools of MCP servers, another people's package, over stdio and HTTP: listed, called, bounded, failing."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from memsafe_rl import GRPOTrainer, MCPTools
from memsafe_rl.errors import ConfigError, MemsafeError
from memsafe_rl.rollout.multi_turn.protocol import Action, ToolCall
from memsafe_rl.rollout.multi_turn.tools import ToolEnvironment, tool_schemas
from tests.images import picture
from tests.rollout.multi_turn.helpers import chat_tokenizer

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

@server.tool()
def fail(reason: str) -> str:
    "Fails."
    raise ToolError(reason)

@server.tool()
def slow(seconds: float) -> str:
    "Waits."
    time.sleep(seconds)
    return "late"

@server.tool()
def long(count: int) -> str:
    "Says much."
    return "x" * count

@server.tool()
def environment(name: str) -> str:
    "Reads a variable."
    return os.environ.get(name, "unset")

@server.tool()
def leave() -> int:
    "Ends the server."
    os._exit(1)

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tools(script: Path) -> Iterator[MCPTools]:
    os.environ["A_SECRET"] = "hidden"
    command = [sys.executable, str(script)]
    with MCPTools(command, env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "GRANTED": 1}) as found:
        yield found
    del os.environ["A_SECRET"]


def called(tools: Any, *calls: tuple[str, dict[str, Any]]) -> Any:
    step: Any = ToolEnvironment(tools).step(Action("", tuple(ToolCall(*call) for call in calls)))
    return asyncio.run(step)


@pytest.mark.slow
def test_the_tools_describe_themselves_and_answer(tools: MCPTools) -> None:
    assert len(tools) == 6
    add = tool_schemas(tools)[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Adds two numbers.")
    assert set(add["parameters"]["properties"]) == {"a", "b"}
    step = called(tools, ("add", {"a": 2, "b": 3}), ("add", {"a": 20, "b": 30}))
    assert [message["content"] for message in step.observation] == ["5", "50"]
    assert step.failures == 0


@pytest.mark.slow
def test_what_fails_becomes_the_result_and_counts_as_a_failed_call(tools: MCPTools) -> None:
    step = called(tools, ("fail", {"reason": "no such city"}), ("add", {"a": "x"}), ("subtract", {}))
    assert step.failures == 3
    assert "no such city" in step.observation[0]["content"]
    assert "Unknown tool 'subtract'" in step.observation[2]["content"]


@pytest.mark.slow
def test_a_command_sees_what_it_is_granted_and_no_secret(tools: MCPTools) -> None:
    step = called(tools, ("environment", {"name": "A_SECRET"}), ("environment", {"name": "GRANTED"}))
    assert [message["content"] for message in step.observation] == ["unset", "1"]


def added_at_once(tools: MCPTools) -> list[Any]:
    """Has eight episodes add a number to 0 at the same time; gives what each gets, or is told."""

    async def calls() -> list[Any]:
        made = (tools.call("add", {"a": place, "b": 0}) for place in range(8))
        return await asyncio.gather(*made, return_exceptions=True)

    return asyncio.run(calls())


def giving(result: Any) -> Any:
    return lambda: result


@pytest.mark.slow
def test_results_that_are_structured_or_embedded_are_shown() -> None:
    kinds = importlib.import_module("mcp.types")
    server = importlib.import_module("mcp.server.mcpserver").MCPServer("shapes")
    inner = kinds.TextResourceContents(uri="a://b", text="inside")
    picture(8, 8).save(file := BytesIO(), format="PNG")
    image = kinds.ImageContent(type="image", data=b64encode(file.getvalue()).decode(), mime_type="image/png")
    results = {
        "structured": kinds.CallToolResult(content=[], structured_content={"city": "Köln"}),
        "parts": kinds.CallToolResult(content=[kinds.EmbeddedResource(type="resource", resource=inner), image]),
        "unreadable": kinds.CallToolResult(content=[image.model_copy(update={"data": "aGk="})]),
    }
    for name, result in results.items():
        server.add_tool(giving(result), name=name, description="?", structured_output=False)
    with MCPTools(server) as tools:
        step = called(tools, ("structured", {}), ("parts", {}))
    assert [message["content"] for message in step.observation] == [
        '{"city": "Köln"}',
        "inside\n[image that is no text]",
    ]
    with MCPTools(server, shows_images=True) as tools:
        shown = called(tools, ("structured", {}), ("parts", {})).observation
        failed = called(tools, ("unreadable", {}))
    assert (failed.failures, "cannot identify image" in failed.observation[0]["content"]) == (1, True)
    assert [message["content"] for message in shown] == [
        '{"city": "Köln"}',
        [{"type": "image", "image": file.getvalue()}, {"type": "text", "text": "inside"}],
    ]


@pytest.mark.slow
def test_calls_are_bounded_in_time_and_length(script: Path) -> None:
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    bounds: dict[str, Any] = {"max_result_characters": 10.0, "max_argument_characters": 200}
    with MCPTools([sys.executable, str(script)], allow=["slow", "long", "fail"], env=env, **bounds) as tools:
        assert [tool.__name__ for tool in tools] == ["fail", "slow", "long"]
        tools._seconds = 1.0
        step = called(tools, ("long", {"count": 25}), ("fail", {"reason": "y" * 300}), ("slow", {"seconds": 5.0}))
        said = [message["content"] for message in step.observation]
    assert said[0] == "xxxxxxxxxx\n[15 characters left out]"
    assert "200 are passed on" in said[1]
    assert "did not answer within 1 seconds" in said[2]
    with pytest.raises(MemsafeError, match="is gone"):
        asyncio.run(tools.call("long", {"count": 1}))


@pytest.mark.slow
def test_a_server_that_dies_is_started_anew(script: Path) -> None:
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with MCPTools([sys.executable, str(script)], env=env) as tools:
        lost = called(tools, ("leave", {}))
        assert lost.failures == 1
        assert "is gone (Connection closed); the next call starts anew" in lost.observation[0]["content"]
        assert added_at_once(tools) == [str(place) for place in range(8)], "all wait for one connection"
    with pytest.raises(MemsafeError, match="it was closed"):
        asyncio.run(tools.call("add", {"a": 1, "b": 2}))


@pytest.mark.slow
def test_a_server_that_starts_no_more_costs_one_attempt_for_all(script: Path, tmp_path: Path) -> None:
    (own := tmp_path / "server.py").write_text(script.read_text())
    with MCPTools([sys.executable, str(own)], env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as tools:
        own.write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')")
        called(tools, ("leave", {}))
        failed = added_at_once(tools)
    assert all("Start it by hand to see why" in str(error) for error in failed)
    assert (tmp_path / "starts").read_text() == "x"


def test_a_result_that_breaks_its_schema_loses_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("no structured content")

    server = importlib.import_module("mcp.server.mcpserver").MCPServer("schemas")
    server.add_tool(giving("a"), name="tell", description="?")
    monkeypatch.setattr(importlib.import_module("mcp.client.session").ClientSession, "validate_tool_result", broken)
    with MCPTools(server) as tools:
        with pytest.raises(RuntimeError, match="no structured content"):
            asyncio.run(tools.call("tell", {}))
        monkeypatch.undo()
        assert not tools._connection.is_lost
        assert asyncio.run(tools.call("tell", {})) == "a"


def test_a_server_that_has_begun_anew_is_connected_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgotten(*_: Any, **__: Any) -> None:
        raise importlib.import_module("mcp.shared.exceptions").MCPError(-32600, "Session not found")

    server = importlib.import_module("mcp.server.mcpserver").MCPServer("sessions")
    server.add_tool(giving("a"), name="tell", description="?")
    monkeypatch.setattr(importlib.import_module("mcp").Client, "call_tool", forgotten)
    with MCPTools(server) as tools:
        with pytest.raises(MemsafeError, match=r"is gone \(Session not found\); the next call starts anew"):
            asyncio.run(tools.call("tell", {}))
        monkeypatch.undo()
        assert asyncio.run(tools.call("tell", {})) == "a"


@pytest.mark.slow
def test_a_server_that_hangs_at_its_start_ends_with_the_process(tmp_path: Path) -> None:
    hangs = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    asks = (
        f"import sys; from memsafe_rl import MCPTools; MCPTools([sys.executable, '-c', {hangs!r}], timeout_seconds=3)"
    )
    ended = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=120, check=False)
    assert "did not answer within 3 seconds" in ended.stderr
    pid = int((tmp_path / "pid").read_text())
    left = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    assert psutil.wait_procs(left, timeout=30)[1] == []


@pytest.mark.slow
def test_servers_that_cannot_be_used_are_refused(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with pytest.raises(ConfigError, match="cannot be used"):
        MCPTools(["no-such-command-anywhere"])
    with pytest.raises(ConfigError, match="cannot be used"):
        MCPTools("http://127.0.0.1:9/mcp", timeout_seconds=10)
    with pytest.raises(ConfigError, match=r"no tool subtract; there are add, environment"):
        MCPTools([sys.executable, str(script)], allow=["subtract"], env=env)
    with pytest.raises(ConfigError, match="no tool of those in `allow`, which names none"):
        MCPTools([sys.executable, str(script)], allow=[], env=env)
    for name, value in (("timeout_seconds", -1), ("timeout_seconds", "x"), ("max_result_characters", 0)):
        with pytest.raises(ConfigError, match=f"{name} is {value!r}. Give a number above 0"):
            MCPTools("http://127.0.0.1:1", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"allow is the text 'add'.*\['add'\]"):
        MCPTools("http://127.0.0.1:1", allow="add")
    with pytest.raises(ConfigError, match="neither a command nor an address"):
        MCPTools("server.py")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install 'memsafe-rl\[mcp\]'"):
        MCPTools(["x"])


@pytest.mark.slow
def test_a_server_that_is_not_there_is_refused_however_slowly_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = asyncio.run

    def lingering(main: Any) -> None:
        run(main)
        time.sleep(0.3)  # its loop is closed, the thread is not over

    monkeypatch.setattr(asyncio, "run", lingering)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        MCPTools(f"http://127.0.0.1:{port}/mcp")


@pytest.mark.slow
def test_a_run_trains_with_the_tools_of_a_server_over_http(script: Path, tmp_path: Path) -> None:
    from tests.trainers.test_episodes import trainer_of

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(script), "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                tools = MCPTools(f"http://127.0.0.1:{port}/mcp", allow=["add"])
                break
            except ConfigError:
                assert time.monotonic() < until
                time.sleep(0.2)
        assert asyncio.run(tools.call("add", {"a": 1, "b": 1})) == "2"
        trainer: GRPOTrainer = trainer_of(
            tmp_path,
            environment_factory=None,
            tools=tools,
            reward_funcs=lambda completions, **_: [float(len(str(one))) for one in completions],
            processing_class=chat_tokenizer(),
            max_steps=1,
        )
        trainer.train()
        assert "tools/call_frequency" in trainer.history[-1]
        tools.close()
    finally:
        server.kill()
        server.wait()
