"""Texts and files of many kinds with a secret in each, drawn by a seed: nothing here is a credential."""

# ruff: noqa: E501
from __future__ import annotations

import base64
import gzip
import json
import random
import string
import urllib.parse
from collections.abc import Iterator

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
LOWER = string.ascii_lowercase + string.digits
UPPER = string.ascii_uppercase + string.digits
URLSAFE = ALNUM + "-_"
BASE64 = ALNUM + "+/"
PASSWORDS = ("Tr0ub4dor&3", "kV9!mQz2#pLx", "correct-horse-7-battery", "S3cure.Pa55word", "hunter2hunter2")
TEXTS: dict[str, str] = {
    # {NAME:LENGTH} draws from an alphabet, {pw} takes a password, {is:TEXT} is one; {=TEXT} may stay
    "aws id": "aws_access_key_id = {=AKIA}{UPPER:16}",
    "aws secret": "aws_secret_access_key = {BASE64:40}",
    "aws session": "export AWS_SESSION_TOKEN={=IQoJb3JpZ2luX2Vj}{BASE64:200}",
    "aws secret in a call": 'boto3.client("s3", aws_secret_access_key="{BASE64:40}")',
    "gcp api key": "https://maps.googleapis.com/maps/api/js?key={=AIza}{URLSAFE:35}&v=3",
    "gcp oauth": "client_secret: {=GOCSPX-}{URLSAFE:28}",
    "gcp access token": "gcloud said {=ya29.a0}{URLSAFE:120}",
    "azure storage": "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={BASE64:86}==;EndpointSuffix=core",
    "azure ad secret": "AZURE_CLIENT_SECRET={ALNUM:3}8Q~{URLSAFE:34}",
    "azure sas": "https://shop.blob.core.windows.net/c?sv=2024&sp=r&sig={ALNUM:43}%3D",
    "azure devops pat": "AZURE_DEVOPS_EXT_PAT={LOWER:52}",
    "github classic": "remote: https://{=ghp_}{ALNUM:36}@github.com/a/b.git",
    "github fine": "token {=github_pat_}{ALNUM:22}_{ALNUM:59}",
    "github app": "GITHUB_TOKEN: {=ghs_}{ALNUM:36}",
    "gitlab pat": "PRIVATE-TOKEN: {=glpat-}{URLSAFE:20}",
    "gitlab runner": "gitlab-runner register --registration-token {=GR1348941}{URLSAFE:20}",
    "gitlab trigger": "curl -F token={=glptt-}{HEX:40} https://gitlab.com/api/v4/trigger",
    "bitbucket": "bitbucket_client_secret = '{URLSAFE:64}'",
    "slack bot": "SLACK={=xoxb-}{DIGITS:12}-{DIGITS:12}-{ALNUM:24}",
    "slack webhook": "post to https://hooks.slack.com/services/T{UPPER:8}/B{UPPER:8}/{ALNUM:24}",
    "slack app": "{=xapp-1-}A{UPPER:9}-{DIGITS:12}-{HEX:64}",
    "stripe": "stripe.api_key = '{=sk_live_}{ALNUM:24}'",
    "stripe restricted": "use {=rk_live_}{ALNUM:40} for it",
    "stripe webhook": "endpoint_secret={=whsec_}{ALNUM:32}",
    "openai": "OPENAI_API_KEY={=sk-}{ALNUM:20}T3BlbkFJ{ALNUM:20}",
    "openai project": "client = OpenAI(api_key='{=sk-proj-}{URLSAFE:74}T3BlbkFJ{URLSAFE:74}')",
    "anthropic": "x-api-key: {=sk-ant-api03-}{URLSAFE:93}AA",
    "hugging face": "login(token='{=hf_}{ALPHA:34}')",
    "replicate": "REPLICATE_API_TOKEN={=r8_}{ALNUM:37}",
    "groq": "groq {=gsk_}{ALNUM:52}",
    "perplexity": "{=pplx-}{ALNUM:48}",
    "xai": "key {=xai-}{ALNUM:80}",
    "cohere": "COHERE_API_KEY={ALNUM:40}",
    "mistral": "export MISTRAL_API_KEY={ALNUM:32}",
    "npm": "//npm.example.org/:_authToken={=npm_}{ALNUM:36}",
    "npm legacy": "//npm.example.org/:_authToken={HEX:8}-{HEX:4}-{HEX:4}-{HEX:4}-{HEX:12}",
    "npm basic": "_auth = {BASE64:40}",
    "pypi": "password = {=pypi-AgEIcHlwaS5vcmc}{URLSAFE:140}",
    "rubygems": "gem push --key {=rubygems_}{HEX:48}",
    "nuget": '<add key="ClearTextPassword" value="{pw}" />',
    "docker hub": "docker login -u me -p {=dckr_pat_}{URLSAFE:27}",
    "docker password": "docker login -u me -p {pw} registry.example.org",
    "twilio": "TWILIO_KEY {=SK}{HEX:32}",
    "twilio auth": "twilio_auth_token = '{HEX:32}'",
    "sendgrid": "{=SG.}{URLSAFE:22}.{URLSAFE:43}",
    "mailgun": "mailgun: {=key-}{HEX:32}",
    "mailchimp": "MAILCHIMP_API_KEY={HEX:32}-us12",
    "telegram": "https://api.telegram.org/bot{DIGITS:10}:AA{URLSAFE:33}/getMe",
    "telegram bare": "bot = Bot('{DIGITS:10}:AA{URLSAFE:33}')",
    "discord bot": "client.run('{=M}{ALNUM:25}.{URLSAFE:6}.{URLSAFE:38}')",
    "discord webhook": "https://discord.com/api/webhooks/{DIGITS:18}/{URLSAFE:68}",
    "digitalocean": "doctl auth init -t {=dop_v1_}{HEX:64}",
    "databricks": "DATABRICKS={=dapi}{HEX:32}",
    "vault": "VAULT_TOKEN={=hvs.}{URLSAFE:95}",
    "vault legacy": "vault login {=s.}{ALNUM:24}",
    "terraform cloud": "credentials app.terraform.io token {ALNUM:14}.atlasv1.{URLSAFE:67}",
    "pulumi": "{=pul-}{HEX:40}",
    "heroku": "HEROKU_API_KEY={HEX:8}-{HEX:4}-{HEX:4}-{HEX:4}-{HEX:12}",
    "cloudflare": "cloudflare_api_key: {HEX:37}",
    "fastly": "Fastly-Key: {URLSAFE:32}",
    "netlify": "NETLIFY_AUTH_TOKEN={URLSAFE:43}",
    "linear": "{=lin_api_}{ALNUM:40}",
    "notion": "notion = {=ntn_}{DIGITS:11}{ALNUM:35}",
    "airtable": "{=pat}{ALNUM:14}.{HEX:64}",
    "shopify": "{=shpat_}{HEX:32}",
    "square": "{=EAAA}{URLSAFE:60}",
    "datadog": "DD_API_KEY={HEX:32}",
    "new relic": "{=NRAK-}{UPPER:27}",
    "sentry": "{=sntrys_}{=eyJpYXQiO}{ALNUM:60}LCJyZWdpb25fdXJs{ALNUM:30}_{ALNUM:43}",
    "grafana": "{=glsa_}{ALNUM:32}_{HEX:8}",
    "postman": "{=PMAK-}{HEX:24}-{HEX:34}",
    "age": "{=AGE-SECRET-KEY-1}{AGE:58}",
    "1password": "{=ops_eyJ}{ALNUM:260}",
    "dynatrace": "{=dt0c01.}{UPPER:24}.{UPPER:64}",
    "planetscale": "{=pscale_pw_}{ALNUM:43}",
    "doppler": "{=dp.pt.}{ALNUM:43}",
    "facebook": "fb_exchange={=EAAM}{ALNUM:120}",
    "jwt": "cookie: session={=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI}{URLSAFE:40}.{URLSAFE:43}",
    "jwt in a url": "/verify?t={=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI}{URLSAFE:40}.{URLSAFE:43}",
    "bearer": "Authorization: Bearer {URLSAFE:40}",
    "basic": "Authorization: Basic {BASE64:32}==",
    "curl user": "curl -u admin:{pw} https://example.org/",
    "curl user quoted": "curl --silent --user 'admin:{pw}' https://example.org/",
    "curl header": 'curl -H "X-Api-Key: {HEX:32}" https://example.org',
    "wget": "wget --user=me --password={pw} https://example.org",
    "cookie header": "Cookie: theme=dark; sessionid={LOWER:32}",
    "set cookie": "Set-Cookie: connect.sid=s%3A{URLSAFE:32}.{ALNUM:43}; Path=/; HttpOnly",
    "curl cookie": "curl -b 'PHPSESSID={LOWER:26}' https://example.org",
    "postgres url": "DATABASE_URL=postgres://app:{pw}@db.example.org:5432/app",
    "mongo url": "mongodb+srv://root:{pw}@cluster0.example.net/test",
    "redis url": "redis://:{pw}@cache:6379/0",
    "amqp url": "amqp://guest:{pw}@mq/vhost",
    "jdbc": "jdbc:postgresql://db/app?user=app&password={pw}",
    "odbc": "Server=db;Database=app;User Id=sa;Password={pw};",
    "mysql flag": "mysql -h db -u root -p{pw} app",
    "psql variable": "PGPASSWORD={pw} psql -h db -U app",
    "sshpass": "sshpass -p '{pw}' ssh me@host",
    "netrc line": "machine api.example.org login me password {pw}",
    "pgpass line": "db.example.org:5432:app:app:{pw}",
    "yaml": "database:\n  username: app\n  password: {pw}\n",
    "json": '{{"user": "app", "password": "{pw}"}}',
    "python": "password = '{pw}'",
    "php": "define('DB_PASSWORD', '{pw}');",
    "go": 'const apiSecret = "{ALNUM:32}"',
    "xml": "<password>{pw}</password>",
    "properties": "spring.datasource.password={pw}",
    "ssh key": "-----BEGIN OPENSSH PRIVATE KEY-----\n{BASE64:70}\n{BASE64:70}\n{BASE64:70}\n-----END OPENSSH PRIVATE KEY-----",
    "pgp": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{BASE64:64}\n{BASE64:64}\n=abcd\n-----END PGP PRIVATE KEY BLOCK-----",
    "kube secret": "kind: Secret\nmetadata:\n  name: db\ndata:\n  password: {BASE64:24}\n",
    "kube token": "users:\n- name: me\n  user:\n    token: {URLSAFE:60}\n",
    "django": "SECRET_KEY = 'django-insecure-{DJANGO:50}'",
    "flask": 'app.secret_key = b"{HEX:32}"',
    "rails": "secret_key_base: {HEX:128}",
    "ansible": "ansible_become_pass: {pw}",
    "base64 of an assignment": "{64:DB_PASSWORD={pw}}",
    "base64 of a token": "echo {64:token ghp_{ALNUM:36} end} | base64 -d",
    "hex of an assignment": "{16:API_KEY={ALNUM:32}}",
    "url-encoded": "next={%:https://app:{pw}@db.example.org/}",
    "cookie jar": "example.org\tTRUE\t/\tFALSE\t0\tsid\t{LOWER:26}",
    "prose": "the password is {pw}, do not share it",
    "atlassian api": "JIRA {=ATATT3xFfGF0}{URLSAFE:180}={UPPER:8}",
    "figma": "X-Figma-Token: {=figd_}{URLSAFE:40}",
    "cloudflare user token": "CF_API_TOKEN={URLSAFE:40}",
    "openrouter": "{=sk-or-v1-}{HEX:64}",
    "langsmith": "LANGCHAIN_API_KEY={=lsv2_pt_}{HEX:32}_{HEX:10}",
    "langfuse": "langfuse = Langfuse(secret_key='{=sk-lf-}{HEX:8}-{HEX:4}-{HEX:4}-{HEX:4}-{HEX:12}')",
    "weights and biases": "wandb login {HEX:40}",
    "wandb netrc": "machine api.wandb.ai\n  login user\n  password {HEX:40}\n",
    "pinecone": "pc = Pinecone(api_key='{=pcsk_}{ALNUM:5}_{ALNUM:63}')",
    "supabase": "SUPABASE_SERVICE_ROLE_KEY={=sbp_}{HEX:40}",
    "resend": "{=re_}{ALNUM:8}_{ALNUM:24}",
    "docker org": "{=dckr_oat_}{URLSAFE:32}",
    "tailscale": "tailscale up --authkey {=tskey-auth-}{ALNUM:16}-{ALNUM:32}",
    "ngrok": "ngrok config add-authtoken {ALNUM:27}_{ALNUM:21}",
    "circleci": "CIRCLE_TOKEN: {=CCIPAT_}{ALNUM:22}_{HEX:40}",
    "buildkite": "{=bkua_}{HEX:40}",
    "fly": "FLY_API_TOKEN='FlyV1 {=fm2_}{BASE64:120}'",
    "sonarqube": "sonar-scanner -Dsonar.login={=squ_}{HEX:40}",
    "algolia": "algoliasearch('B1G2GM9NG0', '{HEX:32}')  # admin api key",
    "gitea": "GITEA_TOKEN={HEX:40}",
    "clickhouse": "clickhouse-client --host ch --user default --password {pw}",
    "mssql pyodbc": 'pyodbc.connect("DRIVER={{ODBC Driver 18}};SERVER=db;UID=sa;PWD={pw}")',
    "oracle": "sqlplus system/{pw}@//db:1521/XEPDB1",
    "psql conninfo": 'psql "host=db user=app password={pw} dbname=app"',
    "sqlalchemy percent": "mysql+pymysql://app:{is:p%40ss%2Fw0rd%21}@db:3306/app",
    "snowflake": "snowflake.connector.connect(user='me', password='{pw}', account='xy12345')",
    "redis-cli": "redis-cli -h cache -a {pw} ping",
    "neo4j": "GraphDatabase.driver(uri, auth=('neo4j', '{pw}'))",
    "azure service bus": "Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={BASE64:43}=",
    "azure cosmos": "AccountEndpoint=https://shop.documents.azure.com:443/;AccountKey={BASE64:86}==;",
    "ldap bind": "ldapsearch -x -D cn=admin,dc=example -w {pw} -b dc=example",
    "pip conf": "[global]\nindex-url = https://me:{pw}@pypi.example.org/simple\n",
    "npmrc password": "//npm.example.org/:username=me\n//npm.example.org/:_password={BASE64:24}\n",
    "yarnrc": 'npmRegistries:\n  //npm.example.org:\n    npmAuthIdent: "me:{pw}"\n',
    "docker identity": '{{"auths": {{"r.example.org": {{"identitytoken": "{URLSAFE:60}"}}}}}}',
    "kube exec": "users:\n- name: me\n  user:\n    client-key-data: {BASE64:200}\n",
    "aws ini": "[default]\naws_access_key_id={=ASIA}{UPPER:16}\naws_secret_access_key={BASE64:40}\naws_session_token={BASE64:240}\n",
    "gcp account": '{{"type": "service_account", "private_key_id": "35ff6e9b13d437e4346a51fd2f06182fd2a7f569", "private_key": "-----BEGIN PRIVATE KEY-----\\n{BASE64:64}\\n{BASE64:64}\\n-----END PRIVATE KEY-----\\n"}}',
    "maven": "<server><id>x</id><username>me</username><password>{pw}</password></server>",
    "gradle": "signing.password={pw}\nsonatypePassword={pw}\n",
    "cargo": '[registries.mine]\ntoken = "{=cio}{ALNUM:32}"\n',
    "hub hosts": "github.com:\n    user: me\n    oauth_token: {=gho_}{ALNUM:36}\n",
    "my cnf": '[client]\nuser=root\npassword="{pw}"\n',
    "boto": "[Credentials]\ngs_oauth2_refresh_token = 1//0{URLSAFE:90}\n",
    "pem indented": "key: |\n    -----BEGIN EC PRIVATE KEY-----\n    {BASE64:64}\n    {BASE64:64}\n    -----END EC PRIVATE KEY-----\n",
    "pem commented": "# -----BEGIN PRIVATE KEY-----\n# {BASE64:64}\n# {BASE64:64}\n# -----END PRIVATE KEY-----\n",
    "pem in a diff": "+-----BEGIN RSA PRIVATE KEY-----\n+{BASE64:64}\n+{BASE64:64}\n+-----END RSA PRIVATE KEY-----\n",
    "pem concatenated": 'KEY = ("-----BEGIN PRIVATE KEY-----\\n"\n       "{BASE64:64}\\n"\n       "{BASE64:64}\\n"\n       "-----END PRIVATE KEY-----")',
    "putty": "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{BASE64:64}\nPrivate-MAC: 17d51982d93efc957d773b5f3af5d6a9f9cdfb6db48f03cb7478775594868b96\n",
    "jwk": '{{"kty": "EC", "crv": "P-256", "d": "{URLSAFE:43}"}}',
    "wireguard": "[Interface]\nPrivateKey = {BASE64:43}=\n",
    "httpie": "http -a me:{pw} GET https://example.org/api",
    "httpie header": "http GET example.org/api 'Authorization:Token {HEX:40}'",
    "python headers": 'headers = {{"Authorization": f"Bearer {URLSAFE:40}", "Accept": "*/*"}}',
    "js headers": "fetch(u, {{ headers: {{ 'X-Api-Key': '{HEX:32}', authorization: `Bearer {URLSAFE:40}` }} }})",
    "requests auth": "requests.get(url, auth=('me', '{pw}'))",
    "powershell": "$env:API_TOKEN = \"{ALNUM:32}\"; ConvertTo-SecureString '{pw}' -AsPlainText -Force",
    "terraform": 'variable "db_password" {{\n  default = "{pw}"\n}}\n',
    "cmd set": 'setx DB_PASSWORD "{pw}"',
    "fish": "set -gx MY_TOKEN {ALNUM:32}",
    "dockerfile": "ENV DB_PASSWORD {pw}\nARG NPM_TOKEN={HEX:36}",
    "kubectl": "kubectl create secret generic db --from-literal=pass={pw}",
    "helm": "helm install x ./c --set auth.password={pw},auth.token={ALNUM:30}",
    "k8s env": 'env:\n- name: DB_PASSWORD\n  value: "{pw}"\n',
    "yaml block": "secrets:\n  token: >-\n    {ALNUM:40}\n",
    "password with spaces": 'password: "{is:four horses 7 eat hay!}"',
    "password with quote": "password = \"{is:it's-4-me!}\"",
    "password escaped": '{{"password": "{is:a\\\\\\"b9!Kq#z}"}}',
    "env dump": "HOME=/root\nX_TOKEN={ALNUM:32}\nexport Y_SECRET={HEX:40}\n",
    "query": "GET /v1/x?access_token={HEX:40}&api_key={ALNUM:32} HTTP/1.1",
    "form": "curl -d 'grant_type=password&client_secret={ALNUM:32}&password={pw}' https://example.org",
    "double base64": "{64:{64:AWS_SECRET_ACCESS_KEY={BASE64:40}}}",
    "base64 url in json": '{{"blob": "{64:postgres://app:{pw}@db.example.org/app}"}}',
    "percent basic": "redirect={%:https://example.org/?token=ghp_{ALNUM:36}}",
    "prose colon": "Your temporary password: {pw}\nPlease change it.",
    "prose key": "here is my api key: {HEX:32}",
    "lftp": "lftp -u me,{pw} sftp://files.example.org",
    "vault fields": "vault kv put secret/app password={pw} other={ALNUM:20}",
    "csv column": "id,name,password\n1,ann,{pw}\n2,bob,{is:s3same-open}\n",
    "csv quoted": 'user,"api_key",note\r\nann,"{ALNUM:24}","a, b"\r\nbob,{HEX:32},\r\n',
    "tsv in a diff": "+user\ttoken\n+ann\t{ALNUM:18}\n",
    "jdbc call": 'DriverManager.getConnection("jdbc:mysql://db/app", "app", "{pw}");',
    "xh headers": "xh POST example.org/v1 X-Api-Secret:{ALNUM:16} name=x 'X-Auth-Token:{HEX:24}'",
    "http header": "http :8000/v1 X-Api-Key:{pw}",
}  # fmt: skip
_ALPHABETS = {
    "ALNUM": ALNUM, "HEX": HEX, "LOWER": LOWER, "UPPER": UPPER, "URLSAFE": URLSAFE, "BASE64": BASE64,
    "DIGITS": string.digits, "ALPHA": string.ascii_letters, "AGE": "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    "DJANGO": LOWER + "!@#$%^&*(-_=+)",
}  # fmt: skip


def draw(template: str, rng: random.Random) -> tuple[str, list[str]]:
    """The text, and the pieces of it that nobody may read; an encoded piece is one as a whole."""
    out, pieces, at = "", [], 0
    while at < len(template):
        if template.startswith(("{{", "}}"), at):
            out, at = out + template[at], at + 2
            continue
        if template[at] != "{":
            out, at = out + template[at], at + 1
            continue
        end, depth = at + 1, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(template[end], 0)
            end += 1
        inner, at = template[at + 1 : end - 1], end
        kind, _, rest = inner.partition(":")
        if inner.startswith("="):
            out += inner[1:]
        elif kind in ("64", "16", "%"):
            text = draw(rest, rng)[0]
            encoded = {
                "64": base64.b64encode(text.encode()).decode(), "16": text.encode().hex(),
                "%": urllib.parse.quote(text, safe=""),
            }[kind]  # fmt: skip
            pieces.append(encoded)
            out += encoded
        elif kind == "is":
            pieces.append(rest)
            out += rest
        elif kind == "pw":
            pieces.append(rng.choice(PASSWORDS))
            out += pieces[-1]
        else:
            pieces.append("".join(rng.choices(_ALPHABETS[kind], k=int(rest))))
            out += pieces[-1]
    return out, pieces


def texts(seed: int = 0) -> Iterator[tuple[str, str, list[str]]]:
    for name, template in TEXTS.items():
        yield (name, *draw(template, random.Random(f"{seed}{name}")))


def readable(piece: str, text: str) -> bool:
    """Whether a piece, or twelve characters of a long one, are still there."""
    if len(piece) < 16:
        return piece in text and len(piece) > 3
    return any(piece[i : i + 12] in text for i in range(len(piece) - 11))


def _of(template: str, seed: int) -> tuple[bytes, list[str]]:
    text, pieces = draw(template, random.Random(seed))
    return text.encode(), pieces


def files(seed: int = 0) -> Iterator[tuple[str, bytes, list[str]]]:
    """Name, content, and what may not be read in it, as it is decoded."""
    rng = random.Random(seed)
    drawn = lambda t: draw(t, rng)  # noqa: E731
    text, pieces = drawn(
        "machine api.example.org\n  login me\n  password {pw}\nmachine other\n  login x\n  password {pw}\n"
    )
    yield ".netrc", text.encode(), pieces
    text, pieces = drawn("# host\ndb.example.org:5432:*:app:{pw}\nlocalhost:5432:app:root:{pw}\n")
    yield ".pgpass", text.encode(), pieces
    auth = base64.b64encode(f"me:{rng.choice(PASSWORDS)}".encode()).decode()
    yield "config.json", json.dumps({"auths": {"registry.example.org": {"auth": auth}}}).encode(), [auth]
    text, pieces = drawn(
        "users:\n- name: me\n  user:\n    client-key-data: {64:-----BEGIN RSA PRIVATE KEY-----\n{BASE64:64}\n{BASE64:64}\n-----END RSA PRIVATE KEY-----}\n"
    )
    yield "kubeconfig", text.encode(), pieces
    text, pieces = drawn("DB_HOST=db\nDB_PASSWORD={pw}\nAWS_SECRET_ACCESS_KEY={BASE64:40}\n")
    yield "env.utf16", text.encode("utf-16"), pieces
    yield "env.utf16be", text.encode("utf-16-be"), pieces
    yield "env.gz", gzip.compress(text.encode(), mtime=0), pieces
    yield "state.tfstate", json.dumps({"resources": [{"type": "aws_db_instance", "instances": [
        {"attributes": {"username": "app", "password": pieces[0]}}]}]}).encode(), pieces[:1]  # fmt: skip
    text, pieces = drawn("<?php\ndefine( 'DB_PASSWORD', '{pw}' );\ndefine( 'AUTH_KEY', '{DJANGO:64}' );\n")
    yield "wp-config.php", text.encode(), pieces
    text, pieces = drawn("[pypi]\nusername = __token__\npassword = pypi-{URLSAFE:160}\n")
    yield ".pypirc", text.encode(), pieces
    text, pieces = drawn(
        "-----BEGIN RSA PRIVATE KEY-----\n{BASE64:64}\n{BASE64:64}\n-----END RSA PRIVATE KEY-----\n"
    )
    yield "id_rsa", text.encode(), pieces
    text, pieces = drawn("\x00\x01ELF\xff junk \x00 password={pw}\x00 token=ghp_{ALNUM:36}\x00")
    yield "core.bin", text.encode("latin-1"), pieces
