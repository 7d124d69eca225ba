"""Certificate authority that issues certificates for tests."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


class Authority:
    def __init__(self, folder: Path) -> None:
        self._folder, self._key, self._serial = folder, ec.generate_private_key(ec.SECP256R1()), 0
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.file = folder / "ca.pem"
        self._own = self._signed(self._name, self._key, timedelta(0), timedelta(days=30), [], authority=True)
        self.file.write_bytes(self._own.public_bytes(Encoding.PEM))

    def issue(
        self,
        cert: Path,
        key: Path,
        *,
        names: tuple[str, ...] = ("localhost", "127.0.0.1"),
        begins: timedelta = timedelta(hours=-1),
        lasts: timedelta = timedelta(days=1),
        password: bytes | None = None,
    ) -> int:
        """Write a new certificate and its key; return the certificate's serial number."""
        private = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        leaf = self._signed(subject, private, begins, lasts, list(names), authority=False)
        locked = BestAvailableEncryption(password) if password else NoEncryption()
        key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
        cert.write_bytes(leaf.public_bytes(Encoding.PEM) + self._own.public_bytes(Encoding.PEM))
        return leaf.serial_number

    def pair(self, name: str = "server", **given: object) -> tuple[Path, Path]:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        self.issue(cert, key, **given)  # type: ignore[arg-type]
        return cert, key

    def trusting(self) -> ssl.SSLContext:
        """Return a client's TLS context that trusts this authority."""
        return ssl.create_default_context(cafile=str(self.file))

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begins: timedelta,
        lasts: timedelta,
        names: list[str],
        *,
        authority: bool,
    ) -> x509.Certificate:
        self._serial += 1
        start = datetime.now(UTC) + begins
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(1000 + self._serial)
            .not_valid_before(start - timedelta(minutes=1))
            .not_valid_after(start + lasts)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if names:
            said = x509.SubjectAlternativeName([_name(one) for one in names])
            made = made.add_extension(said, critical=False)
        return made.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
