"""Address of a fleet's gateway on its own machine, and the certificate that identifies it there."""

import ssl
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from deploy.fleet import FleetSpec


def endpoint_of(fleet: FleetSpec) -> str:
    """Return the gateway's URL on its own machine."""
    scheme = "https" if fleet.gateway.tls is not None else "http"
    return f"{scheme}://{_reachable(fleet)}:{fleet.gateway.port}"


def trust_of(fleet: FleetSpec) -> ssl.SSLContext | None:
    """Return a TLS context that trusts exactly the gateway's certificate, under any host name.

    Without TLS, or if the certificate is on another machine, returns None: the system's authorities count.
    """
    leaf = _certificate(fleet)
    if leaf is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=leaf.public_bytes(Encoding.PEM).decode())
    return context


def certificate_of(fleet: FleetSpec) -> str:
    """Return the path of the gateway's certificate; empty without TLS or if it is on another machine."""
    file = Path(fleet.gateway.tls.cert).expanduser() if fleet.gateway.tls is not None else None
    return str(file.absolute()) if file is not None and file.exists() else ""


def curl(fleet: FleetSpec) -> str:
    """Return the start of a `curl` command, up to the URL's path, with options to trust the certificate."""
    leaf, endpoint = _certificate(fleet), endpoint_of(fleet)
    if leaf is None or fleet.gateway.tls is None:
        return f"curl {endpoint}"
    trusting = f"curl --cacert {Path(fleet.gateway.tls.cert).expanduser()}"
    host, port = _reachable(fleet), fleet.gateway.port
    names = _names(leaf)
    name = next((one for one in names if not one.startswith("*")), host)
    if host in names or name == host:
        return f"{trusting} {endpoint}"
    return f"{trusting} --resolve {name}:{port}:{host} https://{name}:{port}"


def _certificate(fleet: FleetSpec) -> x509.Certificate | None:
    file = certificate_of(fleet)
    return x509.load_pem_x509_certificate(Path(file).read_bytes()) if file else None


def _names(leaf: x509.Certificate) -> list[str]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    kinds = (x509.DNSName, x509.IPAddress)
    return [str(one) for kind in kinds for one in names.get_values_for_type(kind)]


def _reachable(fleet: FleetSpec) -> str:
    host = fleet.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # asyncio listens on one family only
    try:
        return f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        return host
