#!/bin/bash
# Builds the site into FOLDER/html, from nothing; Sphinx's own files are in FOLDER/doctrees and
# FOLDER/jupyter_execute.
#   build_docs.sh FOLDER
set -eu
cd "$(dirname "$0")/.."
folder=$1
rm -rf "$folder/html" "$folder/doctrees" "$folder/jupyter_execute"
"${PY:-.venv/bin/python}" -m sphinx -q -W --keep-going -j "${JOBS:-1}" -b html -c docs -d "$folder/doctrees" . "$folder/html"
PYTHONPATH=python "${PY:-.venv/bin/python}" tools/build_gallery.py "$folder/html/gallery"

# Whoever opens a page from a file, without a network, sees all of it.
if grep -rnoE '(<(script|img|iframe)[^>]* src|<link[^>]* href)="(https?:)?//[^"]*"|(url\(|@import)[^;]{0,3}(https?:)?//[^;)]*' \
    --include='*.html' --include='*.css' "$folder/html"; then
  echo 'build_docs.sh: the lines above fetch something from a network when a page is opened' >&2
  exit 1
fi
echo "$(find "$folder/html" -name '*.html' | wc -l) pages: $folder/html/index.html"
