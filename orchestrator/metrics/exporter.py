"""A small HTTP thread that serves /metrics, and nothing else.

    server = serve(lambda: node_samples(...), host="0.0.0.0", port=0)      server.port, server.close()

Numbers are computed when asked for. A source that fails costs its own samples: the endpoint answers with what the
others gave and `pawl_scrape_errors` says how many failed. Agents carry this on every node, so it imports nothing but
the standard library and prometheus_client.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from orchestrator import __version__
from orchestrator.errors import PawlError

Collect = Callable[[], Iterable[Family]]
REQUEST_TIMEOUT_S = 10.0


class Exposition(Collector):
    """A prometheus_client collector over several sources, none of which can take the others down."""

    def __init__(self, sources: Iterable[Collect]) -> None:
        self._sources = tuple(sources)

    def collect(self) -> Iterator[Family]:
        """All families; a name that two sources give is served once, with the samples of both."""
        merged: dict[str, Family] = {}
        errors = 0
        for source in self._sources:
            try:
                families = list(source())
            except Exception:  # whatever a source raises is counted in the answer; the scrape must go on
                errors += 1
                continue
            for family in families:
                _merge(merged, family)
        build = GaugeMetricFamily("pawl_build_info", "Version of pawl; always 1.", labels=["version"])
        build.add_metric([__version__], 1)
        failed = GaugeMetricFamily("pawl_scrape_errors", "Sources that failed for this answer.", value=errors)
        yield from (*merged.values(), build, failed)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self)


def _merge(merged: dict[str, Family], family: Family) -> None:
    held = merged.setdefault(family.name, family)
    if held is family:
        return
    known = {(sample.name, tuple(sorted(sample.labels.items()))) for sample in held.samples}
    held.samples += [s for s in family.samples if (s.name, tuple(sorted(s.labels.items()))) not in known]


class Server:
    """A running endpoint. `port` is the one that was taken (also when 0 was asked for)."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self._http = http
        self.port: int = http.server_address[1]
        self._thread = threading.Thread(target=http.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and give the port back."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def serve(*collect: Collect, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Serve /metrics on host:port. Raises PawlError when the address cannot be taken."""
    exposition = Exposition(collect)

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = exposition.text() if found else b"pawl serves /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if found else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is not worth a line."""

    try:
        http = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise PawlError(
            f"Metrics cannot be served on {host}:{port}: {error.strerror or error}. Choose another port."
        ) from error
    http.daemon_threads = True
    return Server(http)
