"""A server on loopback that speaks Modal's own protocol: it answers what `modal deploy` asks and keeps every request.

The messages and the list of calls are those of the installed modal package, so what is kept is what Modal's cloud would
be asked for. A call without an answer here is refused by the protocol, and the command then fails.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

IMAGE_BUILDER = "2025.06"
NAMES_OF_OBJECTS = {"image_id", "secret_id", "volume_id"}
Answer = Callable[[Any, "Recorder"], Message]


def created_function(request: Any, recorder: Recorder) -> Message:
    """A function as Modal gives it back, with the name that it was created under."""
    ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=request.function)
    return api_pb2.FunctionCreateResponse(
        function_id=request.existing_function_id,
        function=request.function,
        function_data=api_pb2.FunctionData(ranked_functions=[ranked]),
        handle_metadata=api_pb2.FunctionHandleMetadata(
            function_name=request.function.function_name, definition_id=recorder.new_id("de")
        ),
    )


ANSWERS: dict[str, Answer] = {
    "ClientHello": lambda request, recorder: api_pb2.ClientHelloResponse(),
    "AuthTokenGet": lambda request, recorder: api_pb2.AuthTokenGetResponse(token="a.e30.c"),
    "AppGetByDeploymentName": lambda request, recorder: api_pb2.AppGetByDeploymentNameResponse(),
    "AppCreate": lambda request, recorder: api_pb2.AppCreateResponse(app_id=recorder.new_id("ap")),
    "AppHeartbeat": lambda request, recorder: Empty(),
    "AppClientDisconnect": lambda request, recorder: Empty(),
    "AppPublish": lambda request, recorder: api_pb2.AppPublishResponse(url="http://127.0.0.1"),
    "EnvironmentGetOrCreate": lambda request, recorder: api_pb2.EnvironmentGetOrCreateResponse(
        environment_id=recorder.new_id("en"),
        metadata=api_pb2.EnvironmentMetadata(
            name="main", settings=api_pb2.EnvironmentSettings(image_builder_version=IMAGE_BUILDER)
        ),
    ),
    "VolumeGetOrCreate": lambda request, recorder: api_pb2.VolumeGetOrCreateResponse(
        volume_id=recorder.new_id("vo"), metadata=api_pb2.VolumeMetadata(version=request.version)
    ),
    "SecretGetOrCreate": lambda request, recorder: api_pb2.SecretGetOrCreateResponse(secret_id=recorder.new_id("st")),
    "MountBatchedCheckExistence": lambda request, recorder: api_pb2.MountBatchedCheckExistenceResponse(),
    "MountGetOrCreate": lambda request, recorder: api_pb2.MountGetOrCreateResponse(mount_id=recorder.new_id("mo")),
    "ImageGetOrCreate": lambda request, recorder: api_pb2.ImageGetOrCreateResponse(
        image_id=recorder.new_id("im"),
        result=api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS),
    ),
    "FunctionPrecreate": lambda request, recorder: api_pb2.FunctionPrecreateResponse(
        function_id=recorder.new_id("fu"),
        handle_metadata=api_pb2.FunctionHandleMetadata(function_name=request.function_name),
    ),
    "FunctionCreate": created_function,
}


class Recorder:
    """What was asked, by the name of the call, in order, and by the name of the object that it made."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.created: dict[str, Any] = {}
        self.url = ""
        self._numbers = itertools.count(1)

    def new_id(self, prefix: str) -> str:
        """A new name of an object, with the prefix that says its kind."""
        return f"{prefix}-{next(self._numbers):022d}"

    def functions(self) -> dict[str, Any]:
        """The functions that were created, by name."""
        return {request.function.function_name: request.function for request in self.requests["FunctionCreate"]}

    def commands_of(self, image_id: str) -> list[str]:
        """The build steps of an image and of those that it is built on, in order."""
        image = self.created[image_id].image
        before = [line for base in image.base_images for line in self.commands_of(base.image_id)]
        return [*before, *image.dockerfile_commands]

    def files_in(self, folder: str) -> set[str]:
        """The files that were put below a folder of a container, by their names below it."""
        names = [file.filename for mount in self.requests["MountGetOrCreate"] for file in mount.files]
        return {name.removeprefix(folder) for name in names if name.startswith(folder)}

    async def answer(self, name: str, stream: Any) -> None:
        """Keep a request and answer it."""
        request = await stream.recv_message()
        self.requests[name].append(request)
        if name not in ANSWERS:
            raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not answered by this server")
        reply = ANSWERS[name](request, self)
        for field in NAMES_OF_OBJECTS.intersection(reply.DESCRIPTOR.fields_by_name):
            self.created[getattr(reply, field)] = request
        await stream.send_message(reply)


def make_service(recorder: Recorder) -> Any:
    """The service of Modal's protocol with every call of it led to the recorder."""

    def lead(name: str) -> Callable[[Any, Any], Any]:
        async def call(service: Any, stream: Any) -> None:
            await recorder.answer(name, stream)

        return call

    names = api_grpc.ModalClientBase.__abstractmethods__
    return type("RecordingService", (api_grpc.ModalClientBase,), {name: lead(name) for name in names})()


@contextmanager
def recording_server() -> Iterator[Recorder]:
    """Answer on a free port for the time of a block."""
    recorder, is_up, is_over = Recorder(), threading.Event(), threading.Event()

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            recorder.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = Server([make_service(recorder)])
            await server.start(sock=listener)
            is_up.set()
            await asyncio.to_thread(is_over.wait)
            server.close()
            await server.wait_closed()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    assert is_up.wait(10)
    try:
        yield recorder
    finally:
        is_over.set()
        thread.join(10)
