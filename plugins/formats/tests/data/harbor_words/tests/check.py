from pathlib import Path

assert Path("/app/count.txt").read_text().strip() == "3"
