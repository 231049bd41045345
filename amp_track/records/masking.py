"""Mask passwords and other secrets of store addresses in messages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote

_SECRET = re.compile("pass|pwd|token|secret|key|auth", re.IGNORECASE)  # in the name of an option of an address
_SECRET_OPTION = re.compile(rf"([?&][^=&\s]{{0,99}}(?:{_SECRET.pattern})[^=&\s]{{0,99}}=)[^&\s]*", re.IGNORECASE)
_PASSWORD = re.compile("://([^:/]*):(.*)@", re.DOTALL)
"""Matches user and password of an address. The password ends at the last @."""
_SEPARATOR = re.compile("[@:/?#]")
"""Matches characters that split an address. A driver takes a password's part after one for the host or database."""
_MOST_SEPARATORS = 32
_SHORTEST_SECRET = 3  # shorter text is not masked: it occurs in too many words
_known_secrets: set[str] = set()


def masked(url: str) -> str:
    """Return the address with its password as ***."""
    if "://" in url:
        return _SECRET_OPTION.sub(r"\1***", _without_password(url))
    return url if url.endswith(".log") else url.rpartition("@")[2]


def _without_password(address: str) -> str:
    head, at, place = address.rpartition("@")
    found = re.search("://([^:/]*):", head)
    if not at or found is None:
        return address
    user = found[1] if "@" not in found[1] else "***"
    return f"{head[: found.start()]}://{user}:***@{place}"


def remember(address: str) -> None:
    """Make `masked_within` mask the secrets of this address in later messages of this process."""
    _known_secrets.update(secrets_of(address))


def secrets_of(address: str) -> set[str]:
    """Return every text that would reveal a part of the password or of a secret option.

    Drivers decode passwords. If a password contains an unescaped @, they take its end for the host.
    """
    found = _PASSWORD.search(address)
    password = found[2] if found is not None else ""
    options = [value for name, value in parse_qsl(address.partition("?")[2]) if _SECRET.search(name)]
    elsewhere = masked(address)
    secrets = set()
    for secret in filter(None, (password, *options)):
        decoded = unquote(secret)
        for form in {secret, decoded, repr(secret)[1:-1], repr(decoded)[1:-1]}:
            cuts = [-1, *(found.start() for found in _SEPARATOR.finditer(form)), len(form)]
            pairs = itertools.combinations(cuts, 2) if len(cuts) <= _MOST_SEPARATORS else itertools.pairwise(cuts)
            parts = {form[start + 1 : end] for start, end in pairs} | {form}
            secrets |= {part for part in parts if len(part) >= _SHORTEST_SECRET and part not in elsewhere}
            secrets |= {f"{form[cut + 1 :]}@" for cut in cuts[1:-1]}
    return secrets


def masked_within(text: str, secrets: Iterable[str] | None = None) -> str:
    """Replace each password and each known secret in a text, such as a database driver's, with ***.

    `secrets` are from `secrets_of`; by default those of all addresses passed to `remember`.
    """
    text = re.sub(r"\S+", lambda word: _masked_word(word[0]), text)
    for secret in sorted(_known_secrets if secrets is None else secrets, key=len, reverse=True):
        text = text.replace(secret, "***@" if secret.endswith("@") else "***")
    return text


def _masked_word(word: str) -> str:
    masked_word = _SECRET_OPTION.sub(r"\1***", _without_password(word))
    head, at, place = masked_word.rpartition("@")
    token = re.search("://[^:/]*$", head) if at else None
    return masked_word if token is None else f"{head[: token.start()]}://***@{place}"
