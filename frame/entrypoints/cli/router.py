"""`frame router`: one address in front of several servers of the same model."""

from __future__ import annotations

import logging

import click
from click.core import ParameterSource

from frame.entrypoints.cli.options import FiniteRange


@click.command(help="Route requests to servers of the same model.")
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="A server, as http://HOST:PORT; may be repeated.")
@click.option("--prefill", "prefills", multiple=True, metavar="URL", help="A server with --disaggregation-mode prefill; may be repeated.")
@click.option(
    "--prefill-timeout", type=FiniteRange(min=0.1), default=60.0,
    help="Seconds that prefill servers have for a prompt, before a decode server computes it.",
)  # fmt: skip
@click.option("--decode", "decodes", multiple=True, metavar="URL", help="A server with --disaggregation-mode decode; may be repeated.")
@click.option("--policy", metavar="NAME", help="Routing policy, by plugin name. Default: the best-ranked one.")
@click.option("--policy-option", "options", multiple=True, metavar="KEY=VALUE", help="A setting of the policy's own; may be repeated.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=30080, help="Port to listen on; 0: a free one.")
@click.option(
    "--discover", "sources", multiple=True, metavar="PATH|URL",
    help="Replicas that come and go: a file with an address a line, or http://NAME:PORT for each DNS address of NAME; may be repeated.",
)  # fmt: skip
@click.option("--admin-host", default="127.0.0.1", help="Address of the admin listener.")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Port of the admin listener (/replicas); 0: a free one. Default: none.")
@click.option("--admin-key", envvar="FRAME_ADMIN_KEY", help="Key that requests to the admin listener must send.")
@click.option("--ssl-certfile", metavar="PATH", help="PEM file of the router's certificate chain; enables TLS.")
@click.option("--ssl-keyfile", metavar="PATH", help="PEM file of its private key. Default: --ssl-certfile.")
@click.option("--ssl-ca-certs", metavar="PATH", help="PEM file of authorities; clients must have a certificate of one of them.")
@click.option("--target-ttft", type=FiniteRange(min=0.001), help="Seconds to the first token that frame_desired_replicas aims at.")
@click.option("--target-itl", type=FiniteRange(min=0.0001), help="Seconds between tokens, likewise; needs FRAME_FLEET_KEY.")
@click.option("--min-replicas", type=click.IntRange(min=1), default=1, help="Least frame_desired_replicas.")
@click.option("--max-replicas", type=click.IntRange(min=1), default=64, help="Most frame_desired_replicas.")
@click.option("--replica-start", type=FiniteRange(min=1), default=60.0, help="Seconds that a replica takes until it serves.")
@click.option("--scale-in-delay", type=FiniteRange(min=1), default=300.0, help="Seconds in which a replica was not needed.")
@click.option("--health-interval", type=FiniteRange(min=0.05), default=2.0, help="Seconds between health checks.")
@click.option("--max-body-bytes", type=click.IntRange(min=1024), default=64 << 20, help="Largest body of a request.")
@click.option("--max-connections", type=click.IntRange(min=1), default=4096, help="Most connections of clients.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="Least severe messages.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Format of log messages, as of frame serve.")
def command(
    replicas: tuple[str, ...],
    prefills: tuple[str, ...],
    prefill_timeout: float,
    decodes: tuple[str, ...],
    policy: str | None,
    options: tuple[str, ...],
    host: str,
    port: int,
    sources: tuple[str, ...],
    admin_host: str,
    admin_port: int | None,
    admin_key: str | None,
    ssl_certfile: str | None,
    ssl_keyfile: str | None,
    ssl_ca_certs: str | None,
    target_ttft: float | None,
    target_itl: float | None,
    min_replicas: int,
    max_replicas: int,
    replica_start: float,
    scale_in_delay: float,
    health_interval: float,
    max_body_bytes: int,
    max_connections: int,
    log_level: str,
    log_format: str,
) -> None:
    from frame.entrypoints.processes.start_signals import StartSignals

    signals = StartSignals()  # before the other imports, which take most of the start

    import uvloop

    from frame.config.server_sections import LogSection
    from frame.core.errors import ConfigError
    from frame.entrypoints import logs
    from frame.entrypoints.handoff import read_fleet_key
    from frame.entrypoints.http.protocol.listening import bound_port
    from frame.entrypoints.keys import AdminKey, is_local
    from frame.entrypoints.router.discovery import MAX_REPLICAS, Source, check_url
    from frame.entrypoints.router.scaling import ScalingTargets
    from frame.entrypoints.router.server import RouterSettings, load_policy, route
    from frame.entrypoints.tls import load_pair

    for source in sources:
        Source(source)  # raises for what is none
    is_dynamic = bool(sources) or admin_port is not None
    if (bool(replicas) or is_dynamic) == bool(decodes) or bool(prefills) > bool(decodes):
        known = "--replica, --discover or --admin-port"
        raise ConfigError(f"name servers with {known}, or prefill servers with --prefill and decode servers with --decode")
    if (admin_port is None) != (admin_key is None):
        raise ConfigError("the admin listener has a port and a key of its own: give --admin-port with --admin-key or FRAME_ADMIN_KEY")
    if admin_key is not None and not admin_key.strip():
        raise ConfigError("--admin-key is empty; give a key")
    flag, servers = ("--decode", decodes) if decodes else ("--replica", replicas)
    urls, prefill_urls = tuple(check_url(url, flag) for url in servers), tuple(check_url(url, "--prefill") for url in prefills)
    if len(urls) > MAX_REPLICAS or len(prefill_urls) > MAX_REPLICAS:
        raise ConfigError(f"{flag} or --prefill names more than {MAX_REPLICAS} servers; start several routers")
    if len({*urls, *prefill_urls}) < len(urls) + len(prefill_urls):
        raise ConfigError(f"{flag if len({*urls}) < len(urls) else '--prefill'} names a server twice")
    targets, key = None, read_fleet_key()
    ctx = click.get_current_context()
    for name in ("min_replicas", "max_replicas", "replica_start", "scale_in_delay"):
        if target_ttft is target_itl is None and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(f"--{name.replace('_', '-')} is for a target; name one with --target-ttft or --target-itl")
    if target_ttft is not None or target_itl is not None:
        if min_replicas > max_replicas:
            raise ConfigError(f"--min-replicas is {min_replicas}, above --max-replicas {max_replicas}; lower it")
        if target_itl is not None and key is None:
            raise ConfigError("--target-itl needs what replicas tell their fleet; set FRAME_FLEET_KEY for the router and its replicas")
        targets = ScalingTargets(target_ttft, target_itl, min_replicas, max_replicas, scale_in_delay, replica_start)
    chosen = load_policy(policy, options)
    certificate = load_pair(ssl_certfile, ssl_keyfile, ("--ssl-certfile", "--ssl-keyfile"), ssl_ca_certs)
    logs.configure("router", LogSection.model_validate({"level": log_level, "format": log_format}), logs.LogWriter())
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports each request
    if not is_local(host):
        logging.getLogger(__name__).warning(
            "the router listens on %s, which other machines can reach, and checks no API key; start its servers with --api-key", host
        )
    signals.hold()
    listener = bound_port(host, port, "--host and --port")
    settings = RouterSettings(
        urls, health_interval, max_body_bytes, max_connections, prefill_urls, key, sources, certificate, targets, prefill_timeout
    )
    admin = None
    if admin_port is not None and admin_key is not None:
        admin = bound_port(admin_host, admin_port, "--admin-host and --admin-port"), AdminKey(admin_key)
    uvloop.run(route(settings, chosen, listener, signals, admin))
