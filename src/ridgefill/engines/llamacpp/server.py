"""An OpenAI-compatible endpoint: llama-cpp-python's own server, answering with a `RidgeLlama`.

Its routes, its streaming and its settings are its own; it is given our model where it would load one. One prompt runs
at a time, as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.errors import EngineMissingError

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama


def create_app(llm: RidgeLlama, name: str, **server_settings: Any) -> Any:
    """The FastAPI application of `llama_cpp.server`, serving ``llm`` as the model ``name``.

    Args:
        server_settings: of `llama_cpp.server.settings.ServerSettings` (``api_key``, ``interrupt_requests``, ...).

    Raises:
        EngineMissingError: the server's packages are not installed.
    """
    llama_cpp()
    try:
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse
        from llama_cpp.server import app as stock
        from llama_cpp.server.model import LlamaProxy
        from llama_cpp.server.settings import ModelSettings, ServerSettings
        from starlette.middleware import Middleware
        from starlette_context.middleware import RawContextMiddleware
        from starlette_context.plugins import RequestIdPlugin
    except ImportError as error:
        raise EngineMissingError(
            "serve a GGUF", f"the server's packages are missing ({error})", 'pip install "ridgefill[server]"'
        ) from error

    class Proxy(LlamaProxy):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def load_llama_from_model_settings(settings: Any) -> Any:
            return llm

    stock.set_server_settings(ServerSettings(**server_settings))
    # What `stock.set_llama_proxy` sets; it can only make a proxy that loads llama_cpp.Llama itself.
    stock._llama_proxy = Proxy([ModelSettings(model=llm.model_path, model_alias=name)])
    app = FastAPI(
        title="ridgefill on llama.cpp",
        middleware=[Middleware(RawContextMiddleware, plugins=(RequestIdPlugin(),))],
    )
    app.include_router(stock.router)

    @app.get("/ridgefill")
    def last_prompt() -> Any:
        """What the last prompt's prefill did."""
        return JSONResponse(None if llm.stats is None else vars(llm.stats))

    return app
