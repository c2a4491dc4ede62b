"""PDF files, honest and other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from io import BytesIO

import pypdf


def pdf(objects: Sequence[bytes], info: int = 0) -> bytes:
    """A file of these objects, numbered from 1; the first one is the catalogue."""
    body, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    named = b"/Info %d 0 R " % info if info else b""
    return (
        body
        + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
        + b"trailer\n<< /Size %d /Root 1 0 R %s>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, named, len(body))
    )


def stream(data: bytes, *, squeezed: bool = False) -> bytes:
    data, coding = (zlib.compress(data), b"/Filter /FlateDecode ") if squeezed else (data, b"")
    return b"<< %s/Length %d >>\nstream\n%s\nendstream" % (coding, len(data), data)


def pages(contents: Sequence[bytes], title: str = "") -> bytes:
    """A file whose pages have these content streams."""
    first = 5
    kids = b" ".join(b"%d 0 R" % (first + 2 * number) for number in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Title (%s) >>" % title.encode("latin-1"),
    ]
    for number, content in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (first + 2 * number + 1)
        )
        objects.append(content)
    return pdf(objects, info=4)


def written(*texts: str, title: str = "") -> bytes:
    """A file with one line of text a page."""
    return pages([stream(b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % text.encode("latin-1")) for text in texts], title)


def locked(data: bytes, password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=BytesIO(data))
    writer.encrypt(password, algorithm="RC4-128")
    out = BytesIO()
    writer.write(out)
    return out.getvalue()


BOMB = pages([stream(b" " * 100_000_000, squeezed=True)] * 3)
ENDLESS = pdf([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 1000000 >>"])
