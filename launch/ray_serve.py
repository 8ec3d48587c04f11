"""ring_la's server, or its reader beside vLLM, as applications of Ray Serve; a replica is one node's processes.

    serve run launch.ray_serve:server model=/models/model gpus=8
    serve run launch.ray_serve:reader_and_vllm model=/models/model gpus=8 read_gpus=4
    serve deploy launch/ray_serve.yaml

Ray gives a replica its GPUs, starts it again where it is not healthy, and passes requests on as they are, answers as
they come. With gpus=0 (the default) `ranks` processes run on CPUs. `python`: the interpreter with ring_la, if it is not
Ray's own. Needs ray[serve].
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlunsplit

import aiohttp
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import StreamingResponse

ROOT = Path(__file__).parents[1]
HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
"""Headers that belong to one connection."""
PATIENCE = 30.0
"""Seconds a stopped server gets to end its requests."""


@serve.deployment(max_ongoing_requests=256, graceful_shutdown_timeout_s=PATIENCE, health_check_period_s=5)
class Group:
    """Processes that serve HTTP on a port of this node, and what passes requests on to them.

    Args:
        command: that starts them; ``{port}`` in it is a free port. environment: what they have beside this one's.
        start: seconds until they answer.
    """

    def __init__(self, command: list[str], environment: dict[str, str], start: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        words = [word.replace("{port}", str(self._port)) for word in command]
        self._start = start
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | {"PYTHONPATH": path} | environment, start_new_session=True
        )
        self._session: aiohttp.ClientSession | None = None
        self._ready = False

    async def check_health(self) -> None:
        """Raise where a new replica is to be started; Ray calls."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")
        if self._ready and not await self._answers():
            raise RuntimeError("the server does not answer, or is about to stop")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on."""
        await self._wait()
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP]
        path, prefix = request.scope["path"], request.scope.get("root_path", "")
        path = path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path
        url, body = self._url(path, request.url.query), await request.body()
        answer = await self._client().request(request.method, url, headers=headers, data=body)

        async def pieces():
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            finally:  # where its client is gone, the request ends
                answer.close()

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
        return StreamingResponse(pieces(), answer.status, kept)

    async def _wait(self) -> None:
        limit = asyncio.get_running_loop().time() + self._start
        while not self._ready:
            await self.check_health()
            self._ready = await self._answers()
            if not self._ready and asyncio.get_running_loop().time() > limit:
                raise RuntimeError(f"the server did not answer within {self._start} seconds")
            await asyncio.sleep(0 if self._ready else 0.5)

    async def _answers(self) -> bool:
        try:
            async with self._client().get(self._url("/health"), timeout=aiohttp.ClientTimeout(5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    def _url(self, path: str, query: str = "") -> str:
        return urlunsplit(("http", f"127.0.0.1:{self._port}", path, query, ""))

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), auto_decompress=False)
        return self._session

    def __del__(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)


def server(args: dict[str, str]) -> Application:
    """`ring-la serve`: model, gpus or ranks, options (more of its options, as in a shell), python, replicas, start."""
    gpus = int(args.get("gpus", 0))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus or int(args.get('ranks', 1))}"]
    command = [args.get("python", sys.executable), *launch, "-m", "ring_la", "serve", args["model"], "--port={port}"]
    return _application([*command, *shlex.split(args.get("options", ""))], {}, args)


def reader_and_vllm(args: dict[str, str]) -> Application:
    """launch/read_and_decode.sh: model, gpus, read_gpus (those the reader has; vLLM has the others), options (of
    `vllm serve`), replicas, start."""
    gpus, read = int(args.get("gpus", 0)), int(args.get("read_gpus", 1))
    command = ["bash", "launch/read_and_decode.sh", args["model"], "--host=127.0.0.1", "--port={port}"]
    command += [f"--tensor-parallel-size={gpus - read}"] if gpus else []
    return _application([*command, *shlex.split(args.get("options", ""))], {"READ_GPUS": str(read)}, args)


def _application(command: list[str], environment: dict[str, str], args: dict[str, str]) -> Application:
    options = {"num_gpus": int(args.get("gpus", 0)), "num_cpus": 1}
    group = Group.options(num_replicas=int(args.get("replicas", 1)), ray_actor_options=options)
    return group.bind(command, environment, float(args.get("start", 3600)))
