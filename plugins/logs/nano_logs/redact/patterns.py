"""What a secret looks like: known beginnings, places where secrets stand, key-like names, and randomness.

All patterns are RE2's, whose time grows with the text alone; the last group that matched is the secret.
`gitleaks.toml` beside this file is that of gitleaks (https://github.com/gitleaks/gitleaks, MIT, revision
b58d3f1) unchanged; a newer one may take its place. Rules that name a file's path alone, and
`generic-api-key`, whose finds `assignments` weighs better, are left out.
"""

# ruff: noqa: E501
from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import re2

from nano_logs.redact.encodings import from_base64

# ---------------------------------------------------------------------------- random strings

_CANDIDATE = re.compile(r"(?<![A-Za-z0-9/_=.])[A-Za-z0-9][A-Za-z0-9+/_\-]{23,199}={0,2}(?![A-Za-z0-9+/_=\-])")
_HASH_BEFORE = re.compile(
    r"(?:sha(?:1|224|256|384|512)|md5|blake2[bs]|h1|integrity|base64)[\-:=,\"' ]+$", re.I
)
_LOWER_RUN = re.compile(r"[a-z]{7}|[A-Z]{7}")
BITS = 4.1
"""lowest entropy, bits a character; 24 random base-64 characters have 4.3, English names less than 4"""
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
    ids of objects in APIs, base 64 of a text with spaces, nor anything after the name of a hash."""
    return [
        match.span()
        for match in _CANDIDATE.finditer(text)
        if _mixed(match[0])
        and entropy(match[0]) >= BITS
        and not is_named(match[0])
        and not _HASH_BEFORE.search(text[max(0, match.start() - 12) : match.start()])
    ]


def is_named(text: str) -> bool:
    """Whether it is a name made of words, an object's id, or base 64 of a text with spaces."""
    words = sum(len(word[0]) for word in _WORDS.finditer(text))
    decoded = from_base64(text[: len(text) // 4 * 4]) or ""
    spaced = " " in decoded or "\n" in decoded
    return words >= _MOST_WORDS * len(text) or _NAMED_ID.match(text) is not None or spaced


def entropy(text: str) -> float:
    """Shannon entropy of the characters, bits per character."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _mixed(text: str) -> bool:
    classes = (sum(map(str.islower, text)), sum(map(str.isupper, text)), sum(map(str.isdigit, text)))
    separators = sum(c in "/-_+" for c in text)
    return min(classes) >= _AT_LEAST_EACH and separators * 6 <= len(text) and _LOWER_RUN.search(text) is None


# ------------------------------------------------------------------- known beginnings and places

_QUOTE = r"""\\?["'`]"""
_STRING = r"""[rbf]?["'][^"'\n]*["']"""
_NAME = (
    r"(?:[A-Za-z0-9_.\-]{0,64}?(?:api[_\-]?key|secret(?:[_.\-]?(?:access[_.\-]?)?key|[_\-]?(?:token|id))?"
    r"|(?:access|private|encryption|signing|auth|account|master|service|license|logged_in|nonce)[_\-]?(?:key|salt)"
    r"|token|passwords?|passwd|pass[_\-]?phrase|pwd|[_.\-](?:pass|pw|psk)|credentials?|(?-i:_AUTH|_PAT)"
    r"|(?:imap|smtp|pop|remote|local|store|key)pass|accesskeysecret|(?:session|phpsess|jsession)[_\-]?id"
    r"|[a-z]\.sid|[_\-]key(?:[_\-]data)?)|pass|pw|psk|bindpw|op_session_\w+)(?:_base|[_\-]?\d{1,2})?"
)
"""a key-like name"""
_ARGUMENTS = r"[ \t](?:[^\n|;]{0,300}?[ \t])??"
"""of a command, before the one that is looked for"""
_PROGRAMS = (
    r"sshpass|(?:docker|podman|helm registry|az) login|redis-cli|ldap\w+|smbclient|mongo\w*|7z|(?:un)?zip"
    r"|twine|cqlsh|security|ipmitool|mosquitto_\w+|snmp\w+|signtool|xfreerdp|nuget|codecov"
)
"""with an option -p, -P, -a, -w, -A, -X, -k, -t or /p before a secret"""
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
PATTERNS: dict[str, Any] = {
    kind: re2.compile(source)
    for kind, source in {
        # distinctive beginnings, whatever follows
        "token": r"\b((?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|glpat-[A-Za-z0-9_\-]{20,}\.[0-9a-z]{2}\.[0-9a-z]{9}\b"
        r"|(?:gh[pousr]_|github_pat_|gl(?:pat|dt|ptt|rt|cbt"
        r"|oas|soat|agent|imt|ft)-|sk-|ya29\.|GOCSPX-|AIza|hvs\.|dckr_pat_)[A-Za-z0-9_\-]{20,}"
        r"|(?:xox[abeoprs]-|xapp-)[A-Za-z0-9\-]{10,}|(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}"
        r"|(?:do[opr]_v1_|dapi|SK|key-)[0-9a-f]{32,64}\b|SG\.[A-Za-z0-9_\-]{16,}\.[A-Za-z0-9_\-]{16,}"
        r"|(?:bot)?[0-9]{8,10}:AA[A-Za-z0-9_\-]{33}\b|pypi-[A-Za-z0-9_\-]{40,}"
        r"|base64:[A-Za-z0-9+/]{43}=|[0-9a-f]{32}(?:-[0-9a-f]{8}){2}\b|GOOG1E[A-Z0-9]{55}\b|fc-[0-9a-f]{32}\b"
        rf"|(?:pat-[a-z]{{2}}[0-9]|sdk|api|mob)-{_UUID}|(?:oauth:|oy2)[a-z0-9]{{30,43}}\b|K10[0-9a-f]{{64}}::\S+"
        r"|AAAA[A-Za-z0-9_\-]{7}:APA91b[A-Za-z0-9_\-]{100,}|access_token\$[a-z]+\$[a-z0-9]{16}\$[0-9a-f]{32}"
        r"|mfa\.[A-Za-z0-9_\-]{60,}"
        r"|[MNO][A-Za-z0-9_\-]{23,27}\.[A-Za-z0-9_\-]{6}\.[A-Za-z0-9_\-]{27,45}"
        r"|eyJ[A-Za-z0-9_\-]{8,}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,})",
        # beginnings that few names have
        "vendor-token": r"\b(?:gsk_|pplx-|xai-|tvly-|nvapi-|rpa_|rnd_|rubygems_|pul-|shp(?:at|ca|pa|ss)_|EAA[A-Z]|cf[a-z]{2}_"
        r"|sq0[a-z]{3}-|NRAK-|sntry[su]_|gls?[ac]_|PMAK-|AGE-SECRET-KEY-1|ops_eyJ|dt0c01\.|pscale_[a-z]{2,5}_"
        r"|lin_(?:api|oauth)_|sb_secret_|AT[ACB]TT3|ATBB|BBDC-|CFPAT-|HRKU-|LTAI|nfp_|pnu_|rdme_|sgp_|npm_"
        r"|sbp_|bku[ai]_|CCIPAT_|tskey-[a-z]+-|lsv2_[a-z]+_|pcsk_|FLWSECK(?:_TEST)?-|esecret_|rzp_(?:live|test)_|jina_|SWMTKN-1-|NRII-|AKID|t1\.|apify_api_"
        r"|token-[a-z0-9]{5}:|sq[uap]_|dckr_oat_|glft-|figo?[dr]_|hf_|r8_"
        r"|xkeysib-|xsmtpsib-|AQVN|AKCp|GR1348941|hv[br]\.|ABSK|vcp_|[A-Za-z0-9]{14}\.atlasv1\.|cio"
        r"|pat[A-Za-z0-9]{14}\.)([A-Za-z0-9_\-.=+/]{18,})",
        # beginnings that many names have
        "short-prefix-token": r"\b(?:ntn_|secret_|re_(?:[A-Za-z0-9]{8}_)?|ph[cx]_|fm[12]_|tfp_|sl\.|s\."
        r"|dp\.[a-z]{2,5}\.|live_)([A-Za-z0-9][A-Za-z0-9\-]{19,})",
        # a truncated block ends with the text
        "private-key": r"-----BEGIN (?:[A-Za-z0-9]+ ){0,3}(?:PRIVATE KEY(?: BLOCK)?|Static key V1)-----"
        r"([\w\s:,.\-+/=\\]{0,200}?[A-Za-z0-9+/=]{16}(?:[A-Za-z0-9+/=\s]|\\[nr])*)",
        "webhook": r"(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
        r"|\.webhook\.office\.com/webhookb2|hooks\.zapier\.com/hooks/catch|conda\.anaconda\.org/t)/([A-Za-z0-9_/@\-]{14,})",
        # curl -u NAME:..., lftp -u NAME,..., mysql -p..., sshpass -p ..., docker login -p ...
        "login": rf"(?:^|[^\w/.])(?:(?:curl|wget|xhs?|https?|lftp){_ARGUMENTS}"
        r"(?:-[A-Za-z]*[uU]|--user|--proxy-user|-a|--auth)[ \t=]?[\"']?[^\s:,\"'$]+[:,]"
        rf"|(?:mysql\w*|mariadb\w*){_ARGUMENTS}-p|sqlplus[ \t]+(?:-\S+[ \t]+)*[^\s/@\"']+/"
        r"|(?:wandb|huggingface-cli|hf auth|vault|railway|infisical)[ \t]login[ \t]+(?:--token[= ])?"
        rf"|(?:{_PROGRAMS}){_ARGUMENTS}(?:-[paPwAXkt]|/p)[ \t=:]?[\"']?)"
        r"([^\s\"'$<\[{-][^\s\"'$<{]{3,})",
        # a secret by its place in the line of a program; -u NAME -p ... of any; echo ... | sudo -S
        "command": r"(?:\b(?:snyk[ \t]auth|bw[ \t]unlock|rabbitmqctl[ \t](?:add_user|change_password)[ \t]\S+"
        r"|htpasswd[ \t]-\w*b\w*[ \t]\S+[ \t]\S+|mc[ \t]alias[ \t]set(?:[ \t]\S+){3}"
        r"|poetry[ \t]config[ \t]http-basic\.\S+[ \t]\S+"
        rf"|config(?:ure)?(?:[ \t]set)?(?:[ \t]--\w+)*[ \t](?i:{_NAME})(?:\.\w+)?)[ \t]+|[ \t]/user:\S+[ \t]+"
        r"|\bbundle[ \t]config[ \t](?:set[ \t])?\S+[ \t][^\s:]+:|-pass(?:in|out)?[ \t]+pass:"
        r"|\betcdctl(?:[ \t]+\S+){0,5}?[ \t]+--user[ =][^\s:]+:|\bcache_peer[ \t][^\n]*?login=[^\s:]+:"
        r"|[ \t](?:-u|-U|--?user(?:name)?|/u:)[ \t=:]?[A-Za-z][^\s:]*[ \t]+(?:-p|/p)[ \t:]?)"
        r"[\"']?([^\s\"'$<\[{-][^\s\"'$<{]{3,})"
        r"|\becho[ \t]+(?:-n[ \t]+)?[\"']?(?:[a-z_]\w*:)?([^\s\"'|$]{4,})[\"']?[ \t]*\|[ \t]*"
        r"(?:sudo[ \t]+(?:-S|chpasswd)|chpasswd|[^\n|]{1,60}--(?:password|token)-stdin)",
        "phrase": r"(?i)(?:mnemonic|(?:seed|recovery)[_ \-]?phrase)[\"']?[ \t]*[:=][ \t]*[\"']?((?:[a-z]{3,8} ){11,23}[a-z]{3,8})"
        r"|minisign encrypted secret key\s+([A-Za-z0-9+/=]{40,})",
        # PASSWORD '...' and IDENTIFIED BY '...' of SQL, PSK "..." of a configuration
        "clause": r"(?i)\b(?:identified[ \t]+(?:with[ \t]+\S+[ \t]+)?by|password(?:[ \t]+for[ \t]+\S+[ \t]*=)?|passwd|pw|psk)[ \t]+"
        r"(?:'([^'\s]{6,})'|\"([^\"\s]{6,})\")|\b(?:user|role)[ \t][^\n;]{1,60}?identified[ \t]+by[ \t]+([^\s;\"']{6,})|\bsend[ \t]+\"([^\"\s\\$]{6,})\\[rn]\"",
        "password-hash": r"\$(?:apr1|[156y]|2[aby]|argon2\w*|scrypt|pbkdf2[\w\-]*)\$([./A-Za-z0-9$=,+\-]{20,})",
        "query": r"[?&](?i:key|token|code|sig|signature|auth|x-amz-signature)=([A-Za-z0-9_\-.~+/%]{20,}=*)",
        # a header of httpie; all fields of a secret of Vault
        "argument": rf"(?:^|[^\w/.])(?:xhs?|https?){_ARGUMENTS}[\"']?(?i:{_NAME}):=?([^\s\"'$<\[{{]{{6,}})"
        r"|\bvault[ \t]+(?:kv[ \t]+(?:put|patch)|write)[ \t]+(?:-\S+[ \t]+)*[^\s=]+[ \t]+"
        r"([^\s=$]+=[^\s$@<\[][^\n|;]*)",
        # auth=("me", "..."), HTTPBasicAuth("me", "..."), getConnection("jdbc:...", "me", "...")
        "call": rf"(?:auth[\"']?[ \t]*[=:][ \t]*[(\[]|(?i:basic_?auth)[ \t]*=?[ \t]*[(\[]"
        rf"|(?i:(?:get|create)?connect(?:ion)?|mysqli\w*)\([ \t]*{_STRING}[ \t]*,)[ \t]*{_STRING}[ \t]*,[ \t]*"
        r"[rbf]?[\"']([^\"'\n]{4,})[\"']"
        # login("me", "..."), Client("AC...", "..."), Fernet("..."), jwt.encode(x, "..."), cookies={"a": "..."}
        rf"|(?:\.login[ \t]*\([ \t]*{_STRING}|\bAC[0-9a-f]{{32}}[\"'])[ \t]*,[ \t]*[rbf]?[\"']([^\"'\n]{{6,}})[\"']"
        rf"|(?:jwt\.(?:en|de)code\([^,\n]{{1,80}},|hmac\.new\(|Fernet\(|SecretStr\(|\b(?i:client|init)\((?:{_STRING}[ \t]*,)?"
        rf"|(?i:cookies)[ \t]*[=:][ \t]*\{{[ \t]*{_STRING}[ \t]*:)[ \t]*[rbf]?[\"']([A-Za-z0-9+/_\-=.]{{20,}})[\"']"
        r"|(?i:ConvertTo-SecureString)[ \t]+(?:-(?i:string)[ \t]+)?[\"']([^\"'\n$]{4,})[\"']",
        # host=... user=... password=...
        "connection-string": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}[\"']?[ \t:,;/]+[\"']?([A-Za-z0-9+/]{40})\b|(?i:host|hostaddr|user|user id|uid|dbname|database|server|data source)="
        r"[^\s\"'=,;&]*(?:[ ;&][A-Za-z_ ]{1,30}=[^\s\"'=,;&]*){0,20}[ ;&](?i:password|pwd)="
        r"([^\s\"'`;&,()]{4,})|(?:AccountKey|account\.key\.[a-z0-9.]+|SharedAccessKey|sig)=([A-Za-z0-9+/%]{30,}={0,2})",
        # a variable of Terraform, an entry of an environment in YAML or JSON, of a property list, of Kaggle
        "named-value": rf"variable[ \t]+\"(?i:{_NAME})\"[ \t]*\{{[^}}]{{0,300}}?default[ \t]*=[ \t]*"
        r"\"([^\"\s${<]{4,})\""
        rf"|[\"']?(?i:name|key)[\"']?[ \t]*:[ \t]*[\"']?(?i:{_NAME})[\"']?[ \t]*,?[ \t\r\n]{{1,60}}"
        r"[\"']?(?i:value)[\"']?[ \t]*:[ \t]*[\"']?([^\s\"'`,{}\[\]$<][^\s\"'`,]{3,})"
        rf"|<key>(?i:{_NAME})</key>[ \t\r\n]{{0,60}}<string>([^<\s]{{6,}})</"
        rf"|[\"'](?i:--?{_NAME})[\"'][ \t]*,[^()\n]{{0,80}}?\bdefault=[\"']([^\"'\n]{{6,}})[\"']"
        rf"|\"(?i:{_NAME})\"[ \t]*:[ \t]*\{{[ \t\r\n]{{0,60}}\"value\"[ \t]*:[ \t]*\"([^\"\n]{{6,}})\""
        r"|\"username\"[ \t]*:[ \t]*\"[^\"\n]*\"[ \t]*,[ \t]*\"key\"[ \t]*:[ \t]*\"([0-9a-f]{32})\"",
        # .netrc, .pgpass
        "netrc": r"\b(?:machine|login|account)[ \t]+[^\s\"']+"
        r"(?:[ \t\r\n]{1,40}(?:login|account|user)[ \t\r\n]{1,40}[^\s\"']+)?"
        r"[ \t\r\n]{1,40}password[ \t\r\n]{1,40}([^\s\"']{4,})"
        r"|(?m:^[+\- ]?[A-Za-z0-9_.*\-]+:(?:[0-9]{2,5}|\*):[^:\s]+:[^:\s]+:([^:\s]{4,})$)",
        "cookie": r"(?i:cookie)[\"']?[ \t]*[:=][ \t]*[\"']?([A-Za-z0-9_.\-]+=[^\r\n\"']{8,})"
        rf"|\bcurl{_ARGUMENTS}(?:-b|--cookie)[ =]?[\"']?([A-Za-z0-9_.\-]+=[^\s\"']{{8,}})"
        r"|(?m:^\S+\t(?:TRUE|FALSE)\t\S+\t(?:TRUE|FALSE)\t[0-9]+\t(\S+\t\S{8,})$)",
        "registry-auth": r"\"(?:auth|(?:identity|registry)token)\"[ \t]*:[ \t]*"
        r"\"([A-Za-z0-9+/_\-.]{8,}={0,2})\""
        r"|(?i:npmAuthIdent)[\"']?[ \t]*:[ \t]*[\"']?[^\s:\"']+:([^\s\"']{4,})"
        r"|(?m:^_auth[ \t]*=[ \t]*([A-Za-z0-9+/]{12,}={0,2})\r?$)|:_(?:authToken|auth|password)(?:[ \t]*=)?[ \t]*[\"']?([^\s\"'$]{8,})",
        "url-password": r"\b[A-Za-z][A-Za-z0-9+.\-]{1,20}://[^\s:/@\"'`<>]*:([^\s@/\"'`<>]{3,})@",
        "authorization": rf"(?i:authorization)(?:{_QUOTE})?[ \t]*[:=][ \t]*(?:{_QUOTE})?"
        r"(?:(?i:bearer|basic|token|apikey)[ \t]+([A-Za-z0-9_\-.~+/=]{8,})|(?:[A-Z][A-Za-z\-]+[ \t]+)?([A-Za-z0-9_\-.~+/=]{20,}))"
        r"|(?i:\bbearer)[ \t]*:?[ \t]+([A-Za-z0-9_\-.~+/%]{20,}=*)",
    }.items()
}
_EXAMPLE = re.compile(r"(?i)pass(?:word|wd)?|pwd|secret|token|user(?:name)?|none|null|x-oauth-basic")
_COOKIE = re.compile(r"[=\t](?=[^;=]{0,40}?[0-9])(?=[^;=]{0,40}?[A-Za-z])[^\s;,=]{10,}|=[A-Za-z0-9]{20,}")
_WORD_ALONE = re.compile(r"[A-Za-z_.\-]+")


def placed_secrets(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans of what `PATTERNS` find, each with its kind, without examples such as `user:password@`."""
    for kind, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            group = _last_group(match)
            if _telling(kind, match[group]):
                yield match.span(0 if kind.endswith("-token") else group), kind


def _last_group(match: Any) -> int:
    return max((n for n, value in enumerate(match.groups(), 1) if value is not None), default=0)


def _telling(kind: str, value: str) -> bool:
    """Whether what a pattern found says anything: no names, no cookie of words, no variable."""
    digit, cases = any(map(str.isdigit, value)), _has_both_cases(value)
    match kind:
        case "vendor-token":
            return digit or (cases and not is_named(value))
        case "short-prefix-token":
            return digit and cases
        case "command" | "clause" | "call":
            words = value.isalpha() or not any(map(str.isalpha, value))
            return (
                (digit or kind != "clause")
                and not words
                and not _CODE.match(value)
                and not _EXAMPLE.fullmatch(value)
            )
        case "query":
            return digit
        case "cookie":
            return _COOKIE.search(value) is not None
        case "connection-string" | "named-value":
            return _WORD_ALONE.fullmatch(value) is None
        case "argument":
            return digit or not value.replace("-", "").replace("_", "").isalpha()
    return _EXAMPLE.fullmatch(value) is None


def _has_both_cases(value: str) -> bool:
    return any(map(str.islower, value)) and any(map(str.isupper, value))


# --------------------------------------------------------------- values of key-like names

_TYPE = r"(?:[ \t]*:[ \t]*[A-Za-z][A-Za-z.\[\]|? ]{0,40}?)"
_ASSIGNED = rf"(?:^|[^A-Za-z0-9_.])(?P<name>(?i:{_NAME}))(?:{_QUOTE}\]?)?{_TYPE}??[ \t]*(?:=>|:=|[:=])[ \t]*"
_ASSIGNMENTS = {
    name: re2.compile(source)
    for name, source in {
        # JSON, YAML, code
        "quoted": _ASSIGNED + r"""[rbfN@]?(?:"((?:[^"\\\n]|\\.){6,})"|'((?:[^'\\\n]|\\.){6,})'"""
        r"""|`((?:[^`\\\n]|\\.){6,})`|\\["'`]([^\s"'`\\]{6,})\\["'`])""",
        # .env files, INI, YAML, a query, a form
        "bare": rf"[{{,][ \t]*(?P<key>(?i:{_NAME})):[ \t]+([^\s\"'`,;(){{}}\[\]]{{8,}})[ \t]*[,}}]"
        # behind a file and a line as grep prints them, too
        r"|(?:^[+\- ]?(?:[\w./\-]+:(?:[0-9]+:)?[ \t]?)?|\\n|[\"'`;&|] ?|\?|,|--(?:from-literal|set|set-string)[ =])[ \t]*"
        rf"(?:(?:export|set|ENV|ARG|-|-e)[ \t]+)?(?P<name>(?i:{_NAME}))[ \t]*(?P<sign>[:=])[ \t]*"
        r"((?:[^\s\"'`#;,\\&]|\\[:=#!]){6,})"
        # amid a line of a shell or a log, with a default, in a mapping of YAML within a line
        rf"|[ \t](?P<word>(?i:{_NAME}))=([^\s\"'`#;,\\&()]{{8,}})(?:[ \t\r]|$)"
        rf"|\$\{{(?P<unset>(?i:{_NAME})):?[=\-]([^\s\"'`$}}]{{6,}})\}}",
        # Dockerfiles, setx, fish; a value on a command line
        "spaced": rf"\b(?:setx|ENV|set[ \t]+-[a-zA-Z]+)[ \t]+(?P<name>(?i:{_NAME}))[ \t]+[\"']?"
        r"([^\s\"'`=]{6,})"
        r"|(?:^|[^A-Za-z0-9_\-])--?(?:[a-z]+-)?(?P<flag>password|passwd|token|(?:api|auth)-?key|secret|pass(?:phrase)?"
        r"|(?:store|key)pass)[= ]"
        r"([^\s\"'`$;|&\\]{6,})",
        # XML, define('DB_PASSWORD', '...')
        "tagged": rf"<(?:[a-z]+:)?(?P<name>(?i:{_NAME}))(?:[ \t][^<>\n]{{0,200}})?>[ \t]*"
        r"([^<>\s]{6,})[ \t]*</"
        rf"|[\"'](?P<key>(?i:{_NAME}))[\"'][ \t\r]{{0,40}}(?:,|value[ \t]*=)[ \t\r]{{0,40}}"
        r"[rbf]?[\"']([^\"'\n]{6,})[\"']"
        rf"|(?i:name|key)=[\"'](?P<attribute>(?i:{_NAME}))[\"'][^<>\n]{{0,200}}>[ \t]*([^<>\s]{{6,}})[ \t]*</",
        # a line of a configuration, the end of a command, a row of a table; admin / ...
        "prose": r"(?i)\b(?:(?P<name>password|passphrase|passcode|api[ \-]key|secret|token)"
        r"[ \t]+(?:(?:(?:was|is|has been)[ \t]+)?(?:re)?(?:set|changed)[ \t]+to|is|was|to|:)|(?P<key>password|passphrase|passcode|api[ \-]key):)[ \t]+"
        r"[\"'`]?([^\s\"'`,;]{6,})"
        r"|(?:^[+\- ]?|[ \t])(?:[a-z]+-)?(?P<word>password|passwd|pass|bindpw|psk|requirepass|masterauth)[ \t]+([^\s\"'`,;:=().]{6,}[^\s\"'`,;:=()]*)[ \t\r]*$"
        r"|\b(?P<noun>password|secret|token|(?:api[ _\-]?)?key)[ \t]+([A-Za-z0-9_\-]{24,})(?:[ \t\r.,]|$)"
        rf"|\|[ \t]*(?P<row>{_NAME})[ \t]*\|[ \t]*`?([^\s`|]{{6,}})`?[ \t]*\|"
        r"|\b(?P<login>log ?in|sign in|credentials)[: ]+(?:(?:with|as|are|is) )?\S+ ?/ ?([^\s\"'`,;/]{6,})",
    }.items()
}
_PLACEHOLDER = re.compile(
    r"(?i)[<{$%(*]|\.\.\.|xxx|\[redacted:|(?:os|env|process|self|this|args|config)\."
    r"|(?:your|my|example|change|changeme|replace|insert|placeholder|dummy|fake|todo|none|null|true|false"
    r"|undefined|default|optional|required)(?![A-Za-z0-9])"
)
_STRONG = re.compile(
    r"(?i)(?:api|secret|access|private|encryption|signing|auth|account|master|service|license|logged_in|nonce)[_.\-]?key$"
)
_CODE = re.compile(r"[A-Za-z_][A-Za-z_.]*\(|[a-z0-9.\-]*[a-z][a-z0-9.\-]*:[0-9]{2,5}$")
"""a call, an address"""
_GENERATED, _KEY = 32, 20
"""characters of a value that may hold brackets; fewest of any other `..._key`"""
_KEY_LINE = re2.compile(
    r"(?i)[^\n]*(?:key|token|secret|passw|passphrase|passcode|pass[\"'`]?[ \t]*[:=]|pwd|credential"
    r"|[_.\-]pass|pass(?:phrase)?[ |]|[_.\-]?p(?:w|sk)\b|_auth|_pat|op_session|sess(?:ion)?[_\-]?id|\.sid|_salt"
    r"|log ?in[ :]|sign in|pass[_\-]phrase)[^\n]*"
)


def assignments(text: str) -> Iterator[tuple[int, int]]:
    """Spans of values that are assigned to key-like names and look like keys."""
    for line in _KEY_LINE.finditer(text):
        for kind, pattern in _ASSIGNMENTS.items():
            for match in pattern.finditer(line[0]):
                named = match.groupdict()
                sign = named.pop("sign", None) or "="
                group = _last_group(match)
                if _credible(kind, next(filter(None, named.values())), match[group], sign):
                    yield line.start() + match.start(group), line.start() + match.end(group)
    yield from _columns(text)


_SEPARATORS = r"[,;\t]"
_HEADER = re2.compile(
    rf"(?im)^[+\- ]?((?:\"?[\w.\-]+\"?{_SEPARATORS})*\"?(?:{_NAME})\"?(?:{_SEPARATORS}\"?[\w.\-]+\"?)*)\r?$"
)
_COLUMN = re.compile(f"(?i){_NAME}")


def _columns(text: str) -> Iterator[tuple[int, int]]:
    """Spans of the values below the key-like names of a table of comma-separated values."""
    at = 0
    for header in _HEADER.finditer(text):
        found = re.search(_SEPARATORS, header[1])
        if found is None or header.start() < at:  # a row of the table before
            continue
        separator, diff = found[0], header.start(1) - header.start()
        names = [name.strip('"') for name in header[1].split(separator)]
        cell = re.compile(rf'(?:"((?:[^"]|"")*)"|([^{separator}"]*)){separator}')
        at = header.end() + 1
        while at < len(text):
            line = text[at : (text.find("\n", at) + 1 or len(text) + 1) - 1]
            row = list(cell.finditer(line.rstrip("\r") + separator, diff))
            if len(row) != len(names):
                break
            for name, match in zip(names, row, strict=True):
                group = match.lastindex or 2
                if _COLUMN.fullmatch(name) and _credible("quoted", name, match[group], "="):
                    yield at + match.start(group), at + match.end(group)
            at += len(line) + 1


def _credible(kind: str, name: str, value: str, sign: str) -> bool:
    """Whether a value of a key-like name looks like a key, and not like code or an example."""
    if len(value) < SHORTEST or _PLACEHOLDER.match(value) or _CODE.match(value):
        return False
    if name.endswith(("_PAT", "_AUTH")) and not (len(value) >= _LONG and any(map(str.isdigit, value))):
        return False
    is_password = any(word in name.lower() for word in ("pass", "pwd"))
    digits = any(map(str.isdigit, value))
    if any(map(str.isspace, value)):  # several words
        return is_password and kind == "quoted" and digits and bool(re.search(r"[!@#$%^&*+~]", value))
    if any(c in value for c in "()[]{}<>"):
        return len(value) >= _GENERATED and entropy(value) >= BITS
    if name.lower().endswith(("_key", "-key", "key_data", "key-data")) and not _STRONG.search(name):
        few = sum(map(str.isdigit, value)) < _AT_LEAST_EACH or any(c in value for c in ":,;\\")
        return len(value) >= _KEY and not few and not is_named(value)
    if value.replace(".", "").isdigit():
        return is_password and kind != "prose"
    if kind == "prose" and (not digits or (len(value) > 23 and is_named(value))):
        return False
    if name.isupper() and sign == "=":
        return not value.startswith(("/", "./", "~"))  # NAME=value in an environment: any text but a path
    identifier = re.fullmatch(r"[A-Za-z_][A-Za-z_]*(?:[.\-][A-Za-z_]+)*", value) is not None
    return (digits and any(map(str.isalpha, value))) or not (identifier or value.isalpha())


# ------------------------------------------------------------------------ secrets seen before

SHORTEST = 6
"""shortest secret that is searched for elsewhere"""
FRAGMENT = 8
"""characters of a part of a long secret that is hidden as well"""
_LONG = 16
_VARIED = 2.0
"""lowest entropy of a fragment, bits per character: rows of one letter or of dashes are no secrets"""


class Known:
    """Secrets that were recognised in a run, to be found wherever they occur again, whole or in part. A word
    of one character class is not searched for: `postgres` as a password would hide every other `postgres`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._fragments: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        for secret in secrets:
            if secret in self._whole or not _searchable(secret):
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
            starts = range(len(text) - FRAGMENT + 1)
            found += [(i, i + FRAGMENT) for i in starts if text[i : i + FRAGMENT] in self._fragments]
        return found


def _searchable(secret: str) -> bool:
    if len(secret) < SHORTEST or "[redacted:" in secret:
        return False
    classes = (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum())
    return len(secret) >= _LONG or sum(any(map(of, secret)) for of in classes) >= 2


# ------------------------------------------------------------------------- rules of gitleaks


def vendor_secrets(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans of the rules' secrets, each with its rule's id. A rule is tried in a text that holds one of its
    keywords; the text holds no lone surrogates."""
    rules, by_keyword, keywords = _gitleaks()
    for number in sorted({rule for hit in keywords.Match(text) or () for rule in by_keyword[hit]}):
        rule = rules[number]
        for match in _compiled(rule["regex"]).finditer(text):
            group = rule.get("secretGroup") or next((n for n, g in enumerate(match.groups(), 1) if g), 0)
            about = {"secret": match[group], "match": match[0], "line": _line(text, match.start())}
            if entropy(match[group]) >= rule.get("entropy", 0.0) and not any(
                _compiled(source).search(about[target]) for target, source in rule["allowed"]
            ):
                yield match.span(group), rule["id"]


def _line(text: str, at: int) -> str:
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]


@cache
def _compiled(source: str) -> Any:
    return re2.compile(source)


@cache
def _gitleaks() -> tuple[list[dict[str, Any]], list[list[int]], Any]:
    """The rules, their numbers by keyword, and the search for all keywords at once."""
    table = tomllib.loads(files("nano_logs.redact").joinpath("gitleaks.toml").read_text(encoding="utf-8"))
    everywhere = [("secret", source) for source in table["allowlist"]["regexes"]]
    rules = [rule for rule in table["rules"] if "regex" in rule and "keywords" in rule]
    rules = [rule for rule in rules if rule["id"] != "generic-api-key"]
    options = re2.Options()
    options.case_sensitive = False
    by_keyword: dict[str, list[int]] = {}
    search = re2.Set.SearchSet(options)
    for number, rule in enumerate(rules):
        rule["allowed"] = everywhere + [
            (allowed.get("regexTarget", "secret"), source)
            for allowed in rule.get("allowlists", ())
            for source in allowed.get("regexes", ())
        ]
        for keyword in rule["keywords"]:
            by_keyword.setdefault(keyword.lower(), []).append(number)
    for keyword in by_keyword:
        search.Add(re2.escape(keyword))
    search.Compile()
    return rules, list(by_keyword.values()), search
