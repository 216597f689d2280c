#!/usr/bin/env bash
# Copy uPlot, the library for the charts of the daemon's page, into the package, with its licence. Run this script where npm can download.
# Usage: bash scripts/vendor_uplot.sh
# For another version, first change VENDORED.toml (`npm view uplot@VERSION dist.integrity`).
set -euo pipefail
cd "$(dirname "$0")/.."
there=asyncrl/serve/page/vendor
named() { sed -n "s/^\"\?$1\"\? = \"\(.*\)\"$/\1/p" "$there/VENDORED.toml"; }
version=$(named version)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm pack --silent --pack-destination "$work" "uplot@$version" >/dev/null
echo "$(named sha512)  $work/uplot-$version.tgz" | sha512sum --check --quiet
tar xzf "$work/uplot-$version.tgz" -C "$work"
cp "$work/package/dist/uPlot.iife.min.js" "$there/uPlot.js"
cp "$work/package/dist/uPlot.min.css" "$there/uPlot.css"
cp "$work/package/LICENSE" "$there/uPlot.LICENSE"
for file in uPlot.js uPlot.css uPlot.LICENSE; do
  echo "$(named "$file")  $there/$file" | sha512sum --check --quiet || echo "enter the digest of $file in $there/VENDORED.toml"
done
echo "uPlot $version is in $there"
