"""Tools of an MCP server, called by the model in training as other tools are."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import threading
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Self, cast

from memsafe_rl.errors import MemsafeError
from memsafe_rl.rollout import refusal
from memsafe_rl.rollout.multi_turn.protocol import Tool

_FAREWELL_SECONDS = 5.0


class _Connection:
    """A connection to a server, in a thread of its own; it is made at once, or says why not."""

    def __init__(self, server: Any, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self.listed: list[Any] = []
        self._ready, self.error, self.is_lost = threading.Event(), "", False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="memsafe-rl-mcp", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a server that is stuck in a call does not see this process end
        if not self._ready.wait(seconds) and not self.error:
            self.error = f"it did not answer within {seconds:g} seconds"
        if self.error:
            self.is_lost = True
            self.close()

    def close(self) -> None:
        """Ends the connection, and the command where one was started."""
        if self._thread.is_alive() and hasattr(self, "_task"):
            with suppress(RuntimeError):  # the loop closes by itself where the server is lost
                self.loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_FAREWELL_SECONDS)

    async def _live(self) -> None:
        """Connects, lists the tools, and stays until `close`."""
        self.loop, self._task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with _library().Client(self._server, read_timeout_seconds=self._seconds) as self.client:
                page = await self.client.list_tools()
                self.listed += page.tools
                while page.next_cursor:
                    page = await self.client.list_tools(cursor=page.next_cursor)
                    self.listed += page.tools
                self._ready.set()
                await self.loop.create_future()
        except (Exception, asyncio.CancelledError) as error:
            self.error = self.error or f"{type(_innermost(error)).__name__}: {_innermost(error)}"
        finally:
            self.is_lost = True
            self._ready.set()


class MCPTools:
    """The tools of a server of the Model Context Protocol; pass it as `tools`.

    The server is started, or connected to, at once and kept until `close`. The calls of all episodes run at the same
    time, each once. What a tool calls an error becomes its result, and counts as a failed call. So does a call during
    which the server is lost: it may have done its work. The next call starts the server, or connects to it, anew.

    Args:
        server: a command as a list, such as ``["python", "server.py"]``, which is run with no more of this process's
            environment than a shell needs; an address such as ``"http://localhost:8000/mcp"``; or whatever
            `mcp.Client` takes.
        allow: names of the tools that the model may call; None for all.
        env: further environment variables of a command.
        timeout_seconds: longest wait for the server, at its start and for each call.
        max_result_characters: a longer result is cut, and says so.
        max_argument_characters: longest arguments of a call, as JSON; a call with longer ones fails.
        shows_images: whether the model sees the images of a result, as a network that reads images can; a note stands
            in their place otherwise.

    Raises:
        ConfigError: the package `mcp` is missing, the server does not answer, or has no tool of a name in `allow`.
    """

    def __init__(
        self,
        server: Any,
        *,
        allow: Collection[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        max_result_characters: int = 20_000,
        max_argument_characters: int = 20_000,
        shows_images: bool = False,
    ) -> None:
        bounds = {"timeout_seconds": timeout_seconds, "max_result_characters": max_result_characters}
        for name, value in {**bounds, "max_argument_characters": max_argument_characters}.items():
            refusal.when(not isinstance(value, (int, float)) or not value > 0, "mcp/bound", name=name, value=value)
        refusal.when(isinstance(allow, str), "mcp/allow", allow=allow)
        self._server, self._named = _target(server, env), f"{server!r:.100}"
        self._seconds, self._most = timeout_seconds, (max_argument_characters, max_result_characters)
        self._shows_images = shows_images
        self._connecting, self._is_closed = threading.Lock(), False
        self._connection = self._known(_Connection(self._server, self._seconds))
        there: dict[str, Any] = {tool.name: tool for tool in self._connection.listed}
        missing = sorted(set(allow or ()) - there.keys())
        if missing or not there or (allow is not None and not allow):
            self.close()
            lacking = ", ".join(missing) or ("at all" if not there else "of those in `allow`, which names none")
            raise refusal("mcp/tool", server=self._named, lacking=lacking, names=", ".join(sorted(there)) or "none")
        self._tools = [_tool(self, tool) for name, tool in there.items() if allow is None or name in allow]

    def __iter__(self) -> Iterator[Tool]:
        """Yields the tools."""
        return iter(self._tools)

    def __len__(self) -> int:
        """Counts the tools."""
        return len(self._tools)

    def __enter__(self) -> Self:
        """Returns the tools; leaving closes the server's connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self.close()

    def close(self) -> None:
        """Ends the connection, and the command where one was started."""
        self._is_closed = True
        self._connection.close()

    def _known(self, connection: _Connection) -> _Connection:
        """Returns a connection that was made."""
        refusal.when(connection.error, "mcp/server", server=self._named, reason=connection.error)
        return connection

    def _anew(self, lost: _Connection) -> _Connection:
        """Returns the connection in place of a lost one; of calls at the same time, one makes it, or fails for all."""
        with self._connecting:
            if self._connection is lost:
                lost.close()
                self._connection = _Connection(self._server, self._seconds)
            if self._is_closed:  # meanwhile
                self._connection.close()
            return self._known(self._connection)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Calls a tool.

        Args:
            name: of the tool, as the server calls it.
            arguments: by name.

        Returns:
            Its result as text; as parts of a message where it shows images.

        Raises:
            MemsafeError: the tool fails, the server is gone or slow, or the arguments are too long.
        """
        size, most = len(json.dumps(dict(arguments), default=str)), self._most[0]
        if size > most:
            raise MemsafeError(f"the arguments of {name} have {size:,} characters; {most:,} are passed on.")
        if self._is_closed:
            raise MemsafeError(f"the MCP server of {name} is gone: it was closed.")
        connection = self._connection
        if connection.is_lost:
            connection = await asyncio.to_thread(self._anew, connection)
        running = asyncio.run_coroutine_threadsafe(self._called(connection, name, dict(arguments)), connection.loop)
        return await asyncio.wrap_future(running)

    async def _called(
        self, connection: _Connection, name: str, arguments: dict[str, Any]
    ) -> str | list[dict[str, Any]]:
        try:
            result = await asyncio.wait_for(connection.client.call_tool(name, arguments), self._seconds)
        except TimeoutError:
            raise MemsafeError(f"{name} did not answer within {self._seconds:g} seconds.") from None
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            # a result breaks its own schema, or the server says so, unless it has begun anew: "Session not found"
            answered = isinstance(error, (RuntimeError, ValueError)) or (code and not str(error).startswith("Session "))
            if answered and code != _library().types.CONNECTION_CLOSED and not connection.is_lost:
                raise
            connection.is_lost = True
            raise MemsafeError(f"the MCP server of {name} is gone ({error}); the next call starts anew.") from error
        text = self._bounded(_shown(result))
        if getattr(result, "is_error", False):
            raise MemsafeError(text)
        images = [b64decode(block.data) for block in result.content if block.type == "image" and self._shows_images]
        if not images:
            return text
        for image in images:  # one that cannot be read is the call's failure, not the run's
            importlib.import_module("PIL.Image").open(BytesIO(image)).load()
        blocks = [block for block in result.content if block.type != "image"]
        said = [{"type": "text", "text": self._bounded("\n".join(map(_text, blocks)))}] if blocks else []
        return [{"type": "image", "image": image} for image in images] + said

    def _bounded(self, text: str) -> str:
        most = self._most[1]
        return text if len(text) <= most else f"{text[: int(most)]}\n[{len(text) - int(most):,} characters left out]"


def _library() -> Any:
    try:
        return importlib.import_module("mcp")
    except ImportError as error:
        raise refusal("mcp/package") from error


def _target(server: Any, env: Mapping[str, str] | None) -> Any:
    library = _library()
    if isinstance(server, Sequence) and not isinstance(server, str):
        command, *arguments = map(str, server) if server else [""]
        texts = {name: str(value) for name, value in (env or {}).items()}
        return library.StdioServerParameters(command=command, args=arguments, env=texts)
    if isinstance(server, Path) or (isinstance(server, str) and not server.startswith(("http://", "https://"))):
        raise refusal("mcp/target", server=str(server))
    return server


def _tool(owner: MCPTools, tool: Any) -> Tool:
    """Returns a function that calls a tool, and describes itself to chat templates."""

    async def call(**arguments: Any) -> str | list[dict[str, Any]]:
        return await owner.call(tool.name, arguments)

    call.__name__ = tool.name
    call.__doc__ = tool.description
    described = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    call.openai_schema = {"type": "function", "function": described}  # type: ignore[attr-defined]
    return call


def _shown(result: Any) -> str:
    """A result as text; of one that is structured alone, its JSON."""
    structured = getattr(result, "structured_content", None)
    if structured is not None and not result.content:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(map(_text, result.content))


def _text(block: Any) -> str:
    text = getattr(getattr(block, "resource", block), "text", None)  # an embedded resource holds its own
    return str(text) if text is not None else f"[{getattr(block, 'type', 'something')} that is no text]"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error
