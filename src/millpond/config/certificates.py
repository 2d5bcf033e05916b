"""The server's TLS, from the files that the configuration names: tried at the start, to be told of a wrong one then."""

from __future__ import annotations

import ssl

from millpond.config.settings import Tls
from millpond.errors import InvalidRequest


def tls_context(tls: Tls) -> ssl.SSLContext | None:
    """None where TLS is not configured. TLS 1.2 at least, as Python has it; mutual with `client_ca`."""
    if tls.cert is None or tls.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    read_certificate(context, tls)
    if tls.client_ca is not None:
        _demand_certificates(context, tls)
    return context


def read_certificate(context: ssl.SSLContext, tls: Tls) -> None:
    """Also into a context that is in use: for the connections that come."""
    assert tls.cert is not None
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidRequest(
            f"tls.cert {tls.cert} and tls.key {tls.key} do not work ({_reason(error)}); name a certificate and the"
            " private key that belongs to it, both PEM, the key without a password"
        ) from None


def _demand_certificates(context: ssl.SSLContext, tls: Tls) -> None:
    try:
        context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"tls.client_ca {tls.client_ca} does not work ({_reason(error)}); name the authority's certificate, PEM"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED


def _no_password() -> str:
    """OpenSSL would ask on the terminal, where nobody may be."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error).lower().replace("_", " ")
