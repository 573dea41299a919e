#!/usr/bin/env bash
# usage: check_release.sh TAG
# A release is the version of CMakeLists.txt, and CHANGELOG.md has its section.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tag=${1:?usage: check_release.sh TAG}
version=$(sed -nE 's/^project\(w4a8 VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
[ "$tag" = "v$version" ] || { echo "the tag is $tag, expected v$version, the version of CMakeLists.txt" >&2; exit 1; }
grep -qE "^## ${version//./\\.} \(20[0-9-]{8}\)$" CHANGELOG.md ||
  { echo "CHANGELOG.md has no section '## $version (date)'" >&2; exit 1; }
echo "release $version"
