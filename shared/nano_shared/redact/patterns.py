"""Patterns of common secrets: one for each kind; the group `secret`, if any, is what is hidden.

Patterns start at word boundaries, so that a long line costs one attempt for each word and not for each
character. `Known` finds secrets again that were recognised elsewhere.

`gitleaks.toml` beside this file is that of gitleaks (https://github.com/gitleaks/gitleaks, MIT, revision
b58d3f1) unchanged; a newer one may take its place. Rules that name a file's path alone, and
`generic-api-key`, whose finds `assignments` weighs better, are left out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import re2

from nano_shared.redact.encodings import Gated, from_base64

_CANDIDATE = re.compile(r"(?<![A-Za-z0-9/_=.])[A-Za-z0-9][A-Za-z0-9+/_\-]{23,199}={0,2}(?![A-Za-z0-9+/_=\-])")
_HASH_BEFORE = re.compile(
    r"(?:sha(?:1|224|256|384|512)|md5|blake2[bs]|h1|integrity|base64)[\-:=,\"' ]+$", re.I
)
_LOWER_RUN = re.compile(r"[a-z]{7}|[A-Z]{7}")
BITS = 4.1
"""lowest entropy, bits per character; 24 random characters of base 64 have 4.3 on average, English
identifiers less than 4"""
_AT_LEAST_EACH = 3
_NAMED_ID = re.compile(
    r"(?:(?:srv)?toolu|msg(?:batch)?|call|chatcmpl|cmpl|resp|fc|rs|gen|run|step|thread|asst|file|batch|vs"
    r"|req|wrkspc|ftjob|cus|evt|price|prod|acct)[_\-]"
)
"""beginnings of the ids of answers, calls and objects in APIs"""
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}")
_MOST_WORDS = 0.6
"""share of a string's characters in words by which it is a name"""


def random_looking(text: str) -> list[tuple[int, int]]:
    """Spans of random-looking strings: 24 to 200 characters of base 64 or its URL form, with at least three
    characters of each of three classes, no seven letters of one case in a row, and 4.1 bits per character.

    Hexadecimal strings do not count: commits and checksums look like keys. Neither do names made of words,
    ids of objects in APIs, base 64 of a text with spaces, nor anything after the name of a hash.
    """
    return [
        match.span()
        for match in _CANDIDATE.finditer(text)
        if _mixed(match[0])
        and entropy(match[0]) >= BITS
        and not _named(match[0])
        and not _HASH_BEFORE.search(text[max(0, match.start() - 12) : match.start()])
    ]


def _named(text: str) -> bool:
    """Whether it is a name made of words, an object's id, or base 64 of a text with spaces."""
    words = sum(len(word[0]) for word in _WORDS.finditer(text))
    decoded = from_base64(text[: len(text) // 4 * 4]) or ""
    return (
        words >= _MOST_WORDS * len(text)
        or _NAMED_ID.match(text) is not None
        or any(c in " \n" for c in decoded)
    )


def entropy(text: str) -> float:
    """Shannon entropy of the characters, bits per character."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _mixed(text: str) -> bool:
    classes = (sum(map(str.islower, text)), sum(map(str.isupper, text)), sum(map(str.isdigit, text)))
    separators = sum(c in "/-_+" for c in text)
    return min(classes) >= _AT_LEAST_EACH and separators * 6 <= len(text) and _LOWER_RUN.search(text) is None


_WORD = r"(?<![A-Za-z0-9_])"  # a dash may be the first character of a diff line

_FIXED = {
    "aws-key-id": r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Z0-9])",
    "github-token": r"gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{20,255}",
    "gitlab-token": r"gl(?:pat|dt|ptt|rt|cbt|oas|soat)-[A-Za-z0-9_\-]{20,}",
    "slack-token": r"xox[abeoprs]-[A-Za-z0-9\-]{10,}|xapp-[A-Za-z0-9\-]{10,}",
    "google-key": r"AIza[A-Za-z0-9_\-]{35}|ya29\.[A-Za-z0-9_\-]{20,}|GOCSPX-[A-Za-z0-9_\-]{20,}",
    "model-api-key": r"sk-(?:[A-Za-z0-9]{2,12}-){0,3}[A-Za-z0-9_\-]{20,}|(?:hf|r8)_[A-Za-z0-9]{30,}",
    "stripe-key": r"(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}",
    "package-token": r"npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_\-]{40,}|dckr_pat_[A-Za-z0-9_\-]{20,}",
    "cloud-token": r"do[opr]_v1_[a-f0-9]{64}|dapi[a-f0-9]{32}|hvs\.[A-Za-z0-9_\-]{20,}",
    "mail-key": r"SG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}|(?:SK|key-)[0-9a-f]{32}(?![0-9a-f])",
    "bot-token": r"(?:bot)?[0-9]{8,10}:AA[A-Za-z0-9_\-]{33}(?![A-Za-z0-9_\-])"
    r"|[MNO][A-Za-z0-9_\-]{23,27}\.[A-Za-z0-9_\-]{6}\.[A-Za-z0-9_\-]{27,45}(?![A-Za-z0-9_\-])",
    # distinctive beginnings, whatever follows
    "vendor-token": r"(?:gsk_|pplx-|xai-|tvly-|nvapi-|rpa_|rubygems_|pul-|shp(?:at|ca|pa|ss)_|EAA[AMC]"
    r"|sq0[a-z]{3}-|NRAK-|sntry[su]_|gls?[ac]_|PMAK-|AGE-SECRET-KEY-1|ops_eyJ|dt0c01\.|pscale_[a-z]{2,5}_"
    r"|lin_(?:api|oauth)_|sb_secret_|AT[ACB]TT3|ATBB|BBDC-|CFPAT-|HRKU-|LTAI|nfp_|pnu_|rdme_|sgp_"
    r"|sbp_|bku[ai]_|CCIPAT_|tskey-[a-z]+-|lsv2_[a-z]+_|pcsk_|sq[uap]_|dckr_oat_|glft-|figo?[dr]_"
    r"|xkeysib-|xsmtpsib-|AQVN|AKCp|GR1348941|hv[br]\.|ABSK|vcp_|[A-Za-z0-9]{14}\.atlasv1\."
    r"|pat[A-Za-z0-9]{14}\.)(?=[A-Za-z0-9_\-.]*[0-9])[A-Za-z0-9_\-.=+/]{18,}",
    # beginnings that names have too: what follows has both cases and digits
    "short-prefix-token": r"(?:ntn_|secret_|re_(?:[A-Za-z0-9]{8}_)?|ph[cx]_|fm[12]_|tfp_|sl\.|s\."
    r"|dp\.[a-z]{2,5}\.)"
    r"(?=[A-Za-z0-9\-]*[0-9])(?=[A-Za-z0-9\-]*[A-Z])(?=[A-Za-z0-9\-]*[a-z])[A-Za-z0-9][A-Za-z0-9\-]{19,}",
    "jwt": r"eyJ[A-Za-z0-9_\-]{8,1024}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}",
}
_QUOTE = r"""\\?["'`]"""
_NAME = (
    r"[A-Za-z0-9_.\-]{0,64}?(?:api[_\-]?key|secret(?:[_\-]?(?:access[_\-]?)?key|[_\-]?token)?"
    r"|(?:access|private|encryption|signing|auth|account|master|service|logged_in|nonce)[_\-]?(?:key|salt)"
    r"|token|passwords?|passwd|passphrase|pwd|[_.\-]pass|credentials?|(?:session|phpsess|jsession)[_\-]?id"
    r"|(?<![A-Za-z0-9])pass|[a-z]\.sid|[_\-]key(?:[_\-]data)?)(?:_base|[_\-]?\d{1,2})?"
)
PATTERNS: dict[str, Gated] = {
    **{kind: Gated(f"{_WORD}(?:{pattern})") for kind, pattern in _FIXED.items()},
    # a truncated block ends with the text
    "private-key": Gated(
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        # each character can match in one way only: otherwise untrusted text could cause exponential
        # backtracking
        r"(?P<secret>(?>[A-Za-z\-]+: (?:(?![A-Za-z0-9+/=]{16})[^\n\\])*+|[A-Za-z0-9+/=\s]|\\[nr])*?"
        r"[A-Za-z0-9+/=]{16}(?:[A-Za-z0-9+/=\s]|\\[nr])*+)",
        gate="-----BEGIN ",
    ),
    "webhook": Gated(
        r"(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
        r"|\.webhook\.office\.com/webhookb2)/(?P<secret>[A-Za-z0-9_/@\-]{20,})"
    ),
    # curl -u NAME:..., mysql -p..., sshpass -p ..., docker login -p ...
    "login": Gated(
        r"(?<![\w/.])(?:(?:curl|wget|xh|https?)[ \t][^\n|;]{0,300}?(?<=[ \t])"
        r"(?:-u|-U|--user|--proxy-user|-a|--auth)[ \t=]?[\"']?[^\s:\"'$]+:"
        r"|(?:mysql\w*|mariadb\w*)[ \t][^\n|;]{0,300}?(?<=[ \t])-p"
        r"|sqlplus[ \t]+(?:-\S+[ \t]+)*[^\s/@\"']+/"
        r"|(?:wandb|huggingface-cli|hf auth|vault|railway|infisical)[ \t]login[ \t]+(?:--token[= ])?"
        r"|(?:sshpass|(?:docker|podman|helm registry|az) login|redis-cli|ldap\w+|smbclient|mongo\w*|7z)[ \t]"
        r"[^\n|;]{0,300}?(?<=[ \t])-[paw][ \t=]?[\"']?)(?P<secret>[^\s\"'$<{-][^\s\"'$<{]{3,})"
    ),
    # auth=("me", "..."), HTTPBasicAuth("me", "...")
    "auth-pair": Gated(
        r"(?:auth[\"']?[ \t]*[=:][ \t]*|(?i:basic_?auth)[ \t]*=?[ \t]*)[(\[][ \t]*"
        r"[rbf]?[\"'][^\"'\n]*[\"'][ \t]*,[ \t]*[rbf]?[\"'](?P<secret>[^\"'\n]{4,})[\"']"
    ),
    # host=... user=... password=...
    "connection-string": Gated(
        r"(?i:host|hostaddr|user|user id|uid|dbname|database|server|data source)=[^\s\"'=,;&]*"
        r"(?:[ ;&][A-Za-z_ ]{1,30}=[^\s\"'=,;&]*){0,20}[ ;&](?i:password|pwd)=(?P<secret>[^\s\"'`;&,()]{4,})"
    ),
    "secure-string": Gated(
        r"(?i:ConvertTo-SecureString)[ \t]+(?:-(?i:string)[ \t]+)?[\"'](?P<secret>[^\"'\n$]{4,})[\"']"
    ),
    # a variable of Terraform, an entry of an environment in YAML or JSON
    "named-value": Gated(
        rf"variable[ \t]+\"(?i:{_NAME})\"[ \t]*\{{[^}}]{{0,300}}?default[ \t]*=[ \t]*"
        r"\"(?P<secret>[^\"\s${<]{4,})\""
        rf"|[\"']?(?i:name|key)[\"']?[ \t]*:[ \t]*[\"']?(?i:{_NAME})[\"']?[ \t]*,?[ \t\r\n]{{1,60}}"
        r"[\"']?(?i:value)[\"']?[ \t]*:[ \t]*[\"']?(?P<value>[^\s\"'`,{}\[\]$<][^\s\"'`,]{3,})"
    ),
    "netrc": Gated(
        r"\b(?:machine|login|account)[ \t]+[^\s\"']+"
        r"(?:[ \t\r\n]{1,40}(?:login|account|user)[ \t\r\n]{1,40}[^\s\"']+)?"
        r"[ \t\r\n]{1,40}password[ \t\r\n]{1,40}(?P<secret>[^\s\"']{4,})"
    ),
    "pgpass": Gated(
        r"^[+\- ]?[A-Za-z0-9_.*\-]+:(?:[0-9]{2,5}|\*):[^:\s]+:[^:\s]+:(?P<secret>[^:\s]{4,})$", re.MULTILINE
    ),
    "cookie": Gated(
        r"(?i:cookie)[\"']?[ \t]*[:=][ \t]*[\"']?(?P<secret>[A-Za-z0-9_.\-]+=[^\r\n\"']{8,})"
        r"|(?<![\w/])curl\b[^\n|;]{0,300}?[ \t](?:-b|--cookie)[ =]?[\"']?"
        r"(?P<jar>[A-Za-z0-9_.\-]+=[^\s\"']{8,})"
    ),
    "cookie-jar": Gated(
        r"^\S+\t(?:TRUE|FALSE)\t\S+\t(?:TRUE|FALSE)\t[0-9]+\t\S+\t(?P<secret>\S{8,})$", re.MULTILINE
    ),
    "registry-auth": Gated(
        r"\"(?:auth|identitytoken|registrytoken)\"[ \t]*:[ \t]*\"(?P<secret>[A-Za-z0-9+/_\-.]{8,}={0,2})\""
        r"|(?i:npmAuthIdent)[\"']?[ \t]*:[ \t]*[\"']?[^\s:\"']+:(?P<ident>[^\s\"']{4,})"
        r"|:_(?:authToken|auth|password)[ \t]*=[ \t]*[\"']?(?P<npm>[^\s\"'$]{8,})"
    ),
    "url-password": Gated(
        r"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.\-]{1,20}://[^\s:/@\"'`<>]*:(?P<secret>[^\s@/\"'`<>]{3,})@"
    ),
    "authorization": Gated(
        r"(?i:authorization)" + f"(?:{_QUOTE})?" + r"[ \t]*[:=][ \t]*" + f"(?:{_QUOTE})?"
        r"(?i:bearer|basic|token|apikey)[ \t]+(?P<secret>[A-Za-z0-9_\-.~+/=]{8,})"
    ),
    "connection-key": Gated(r"(?:AccountKey|SharedAccessKey|sig)=(?P<secret>[A-Za-z0-9+/%]{30,}={0,2})"),
}
_ASSIGNED = rf"(?<![A-Za-z0-9_.])(?P<name>(?i:{_NAME}))(?:{_QUOTE})?[ \t]*(?:=>|:=|[:=])[ \t]*"
_QUOTED = Gated(
    _ASSIGNED + r"""(?:[rbf]?)(?:(?P<quote>["'`])(?P<secret>(?:(?!(?P=quote))[^\s\\]|\\\S){6,})(?P=quote)"""
    r"""|\\(?P<escaped>["'`])(?P<value>[^\s"'`\\]{6,})\\(?P=escaped))"""
)
"""a quoted text assigned to a key-like name: JSON, YAML, code"""
_PHRASE = Gated(
    r"(?<![A-Za-z0-9_.])(?P<name>(?i:[A-Za-z0-9_.\-]{0,64}?(?:passwords?|passwd|passphrase|pwd)))"
    rf"(?:{_QUOTE})?[ \t]*(?:=>|:=|[:=])[ \t]*"
    r"""(?P<quote>["'])(?P<secret>(?=[^"'\n]*[0-9])(?=[^"'\n]*[!@#$%^&*+~])[^"'\n\\]{8,80})(?P=quote)"""
)
"""a password of several words"""
_BARE = Gated(
    r"(?:^[+\- ]?|\\n|[\"'`;&|] ?|\?|,(?! )|--(?:from-literal|set|set-string)[ =])[ \t]*"
    r"(?:(?:export|set|ENV|ARG|-|-e)[ \t]+)?"
    rf"(?P<name>(?i:{_NAME}))(?P<sign>[ \t]*[:=][ \t]*)(?P<secret>[^\s\"'`#;,\\]{{6,}})(?=[\s\"'`#;,\\]|$)",
    re.MULTILINE,
)
"""the same without quotes, at the start of a line: .env files, INI, YAML"""
_SET = Gated(
    rf"(?<![A-Za-z0-9_])(?:setx|ENV|set[ \t]+-[a-zA-Z]+)[ \t]+(?P<name>(?i:{_NAME}))[ \t]+[\"']?"
    r"(?P<secret>[^\s\"'`=]{6,})"
)
"""the same without a sign: Dockerfiles, setx, fish"""
_TAGGED = Gated(
    rf"<(?:[a-z]+:)?(?P<name>(?i:{_NAME}))(?:[ \t][^<>\n]{{0,200}})?>[ \t]*(?P<secret>[^<>\s]{{6,}})[ \t]*</"
    rf"|[\"'](?P<key>(?i:{_NAME}))[\"'][ \t\r]{{0,40}}(?:,|value[ \t]*=)[ \t\r]{{0,40}}"
    rf"[rbf]?[\"'](?P<value>[^\"'\n]{{6,}})[\"']"
)
"""an element of XML, and a second argument or attribute: define('DB_PASSWORD', '...')"""
_PROSE = Gated(
    r"(?i)(?<![A-Za-z0-9_])(?:(?P<name>password|passphrase|passcode|api[ \-]key|secret|token)"
    r"[ \t]+(?:is|was|to|:)|(?P<key>password|passphrase|passcode|api[ \-]key):)[ \t]+"
    r"[\"'`]?(?P<secret>[^\s\"'`,;]{6,})"
)
"""the password is ..."""
_FLAG = Gated(
    r"(?<![A-Za-z0-9_\-])--?(?P<name>(?:[a-z]+-)?(?:password|passwd|token|api-?key|secret))[= ]"
    r"(?P<secret>[^\s\"'`$;|&\\]{6,})"
)
"""a value on a command line"""

_GENERATED = 32
"""characters of a value that may hold brackets, as generated keys do and code does not in so many"""
_PLACEHOLDER = re.compile(
    r"(?i)[<{$%(*]|\.\.\.|xxx|\[redacted:|(?:os|env|process|self|args|config)\."
    r"|(?:your|my|example|change|changeme|replace|insert|placeholder|dummy|fake|todo|none|null|true|false"
    r"|undefined|default|optional|required)(?![A-Za-z0-9])"
)
_STRONG = re.compile(
    r"(?i)(?:api|secret|access|private|encryption|signing|auth|account|master|service|logged_in|nonce)[_\-]?key$"
)
_KEY = 20
"""fewest characters of a value of any other `..._key`"""
_CALL = re.compile(r"[A-Za-z_][A-Za-z_.]*\(")
_ADDRESS = re.compile(r"[a-z0-9.\-]*[a-z][a-z0-9.\-]*:[0-9]{2,5}")
_KEY_LINE = re2.compile(
    r"(?i)[^\n]*(?:key|token|secret|passw|passphrase|passcode|pass[\"'`]?[ \t]*[:=]|pwd|credential"
    r"|[_.\-]pass|sess(?:ion)?[_\-]?id|\.sid|_salt)[^\n]*"
)


_EXAMPLE = re.compile(r"(?i)pass(?:word|wd)?|pwd|secret|token|user(?:name)?|none|null|x-oauth-basic")
_COOKIE = re.compile(r"=(?=[^;=]{0,40}?[0-9])(?=[^;=]{0,40}?[A-Za-z])[^\s;,=]{10,}|=[A-Za-z0-9]{20,}")
_WORD_ALONE = re.compile(r"[A-Za-z_.\-]+")


def telling(kind: str, value: str) -> bool:
    """Whether what a pattern found says anything: not `user:password@`, a cookie of words, or a variable."""
    if kind == "cookie":
        return _COOKIE.search(value) is not None
    return (_WORD_ALONE if kind in ("connection-string", "named-value") else _EXAMPLE).fullmatch(
        value
    ) is None


def assignments(text: str) -> Iterator[tuple[int, int]]:
    """Spans of values that are assigned to key-like names and look like keys."""
    for line in _KEY_LINE.finditer(text):
        for pattern in (_QUOTED, _PHRASE, _BARE, _SET, _TAGGED, _PROSE, _FLAG):
            for match in pattern.finditer(line[0]):
                group = match.lastgroup or "secret"
                if _credible(match, match[group], match.groupdict().get("key") or match["name"]):
                    yield line.start() + match.start(group), line.start() + match.end(group)


def _credible(match: re.Match[str], value: str, name: str) -> bool:
    """Whether a value assigned to a key-like name looks like a key, and not like code or an example."""
    if _PLACEHOLDER.match(value):
        return False
    if _CALL.match(value) or _ADDRESS.fullmatch(value):
        return False
    if any(c in value for c in "()[]{}<>"):
        return len(value) >= _GENERATED and " " not in value and entropy(value) >= BITS
    if name.lower().endswith(("_key", "-key", "key_data", "key-data")) and not _STRONG.search(name):
        return len(value) >= _KEY and not _plain_word(value)
    if match.re is _PROSE.pattern and not any(map(str.isdigit, value)):
        return False
    if value.isdigit() or value.replace(".", "").isdigit():
        return "pass" in name.lower() or "pwd" in name.lower()
    if name.isupper() and match.groupdict().get("sign", "=") == "=":
        return not value.startswith(("/", "./", "~"))  # NAME=value in an environment: any text but a path
    letters, digits = any(c.isalpha() for c in value), any(c.isdigit() for c in value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value)
    identifier = re.fullmatch(r"[A-Za-z_][A-Za-z_]*(?:[.\-][A-Za-z_]+)*", value) is not None
    return (letters and digits) or (mixed and not identifier) or (not identifier and not value.isalpha())


def _plain_word(value: str) -> bool:
    """Whether it is a name, a path or words, and not a key with digits in it."""
    digits = sum(map(str.isdigit, value))
    return digits < _AT_LEAST_EACH or any(c in value for c in " :,;()[]{}<>\\") or _named(value)


SHORTEST = 6
"""shortest secret that is searched for elsewhere"""
FRAGMENT = 8
"""characters of a part of a long secret that is hidden as well"""
_LONG = 16
_VARIED = 2.0
"""lowest entropy of a fragment, bits per character: rows of one letter or of dashes are no secrets"""


class Known:
    """Secrets that were recognised in a run, to be found wherever they occur again, whole or in part.

    A word of one character class is not searched for: `postgres` as a password would hide every other
    `postgres`.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._fragments: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.add(secrets)

    def __bool__(self) -> bool:
        return bool(self._whole)

    def add(self, secrets: Iterable[str]) -> None:
        for secret in secrets:
            if secret in self._whole or not _telling(secret):
                continue
            self._whole.add(secret)
            self._pattern = None
            if len(secret) >= _LONG:
                parts = (secret[i : i + FRAGMENT] for i in range(len(secret) - FRAGMENT + 1))
                self._fragments |= {part for part in parts if entropy(part) >= _VARIED}

    def find(self, text: str) -> list[tuple[int, int]]:
        """Spans of known secrets, and of eight or more characters of one that has at least sixteen."""
        if not self._whole:
            return []
        if self._pattern is None:
            longest_first = sorted(self._whole, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        found = [match.span() for match in self._pattern.finditer(text)]
        if self._fragments:
            found += [
                (i, i + FRAGMENT)
                for i in range(len(text) - FRAGMENT + 1)
                if text[i : i + FRAGMENT] in self._fragments
            ]
        return found


def _telling(secret: str) -> bool:
    if len(secret) < SHORTEST or "[redacted:" in secret:
        return False
    classes = (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum())
    return len(secret) >= _LONG or sum(any(map(of, secret)) for of in classes) >= 2


# ---------------------------------------------------------------------------- rules of gitleaks

_LEFT_OUT = frozenset({"generic-api-key"})


@dataclass(frozen=True)
class VendorRule:
    id: str
    source: str
    """RE2"""
    keywords: Sequence[str]
    """the rule is tried in a text that holds one of them, in whatever case"""
    group: int
    """that is the secret; 0: the first that matched, else the whole match"""
    entropy: float
    """lowest of a secret, bits per character"""
    allowed: Sequence[tuple[str, str]]
    """what of a match (secret, match or line) and the pattern by which it is no secret"""

    @cached_property
    def pattern(self) -> Any:
        return re2.compile(self.source)

    @cached_property
    def _allowed(self) -> list[tuple[str, Any]]:
        return [(target, re2.compile(source)) for target, source in self.allowed]

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        for match in self.pattern.finditer(text):
            group = self.group or next((n for n, g in enumerate(match.groups(), 1) if g), 0)
            secret, whole = match[group], match[0]
            if entropy(secret) < self.entropy:
                continue
            targets = {"match": whole, "line": _line(text, match.start()), "secret": secret}
            if not any(pattern.search(targets[target]) for target, pattern in self._allowed):
                yield match.span(group)


def vendor_secrets(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans of the rules' secrets, each with its rule's id; the text holds no lone surrogates."""
    rules, keywords = _rules()
    for number in sorted({rule for hit in keywords.Match(text) or () for rule in rules[hit]}):
        rule = _all()[number]
        yield from ((span, rule.id) for span in rule.find(text))


def _line(text: str, at: int) -> str:
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]


@cache
def _all() -> list[VendorRule]:
    told = tomllib.loads(files("nano_shared.redact").joinpath("gitleaks.toml").read_text(encoding="utf-8"))
    everywhere = [("secret", source) for source in told["allowlist"]["regexes"]]
    return [
        VendorRule(
            id=rule["id"], source=rule["regex"], keywords=tuple(rule["keywords"]),
            group=rule.get("secretGroup", 0), entropy=rule.get("entropy", 0.0),
            allowed=[*everywhere, *(
                (each.get("regexTarget", "secret"), source)
                for each in rule.get("allowlists", ()) for source in each.get("regexes", ())
            )],
        )
        for rule in told["rules"] if "regex" in rule and "keywords" in rule and rule["id"] not in _LEFT_OUT
    ]  # fmt: skip


@cache
def _rules() -> tuple[list[list[int]], Any]:
    """Numbers of the rules by keyword, and the search for all keywords at once."""
    options = re2.Options()
    options.case_sensitive = False
    by_keyword: dict[str, list[int]] = {}
    search = re2.Set.SearchSet(options)
    for number, rule in enumerate(_all()):
        for keyword in rule.keywords:
            by_keyword.setdefault(keyword.lower(), []).append(number)
    for keyword in by_keyword:
        search.Add(re2.escape(keyword))
    search.Compile()
    return list(by_keyword.values()), search
