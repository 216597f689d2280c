#!/usr/bin/env bash
# Bring uPlot, the charts of the daemon's page, into the package, with its licence. Run it where npm can download.
# Usage: bash scripts/vendor_uplot.sh      Another version: change VERSION and SHA512 (`npm view uplot@VERSION dist.integrity`).
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=1.6.32
SHA512=2883159c6ebccefbb95d751b0b82d010f9e1c0ec41b8bc96d401eda66e882935c89a46cb824332fa369b8cb8122cc6ac36e186cd09bf7a9ded3a4c93c6989023
there=asyncrl/serve/page/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm pack --silent --pack-destination "$work" "uplot@$VERSION" >/dev/null
echo "$SHA512  $work/uplot-$VERSION.tgz" | sha512sum --check --quiet
tar xzf "$work/uplot-$VERSION.tgz" -C "$work"
mkdir -p "$there"
cp "$work/package/dist/uPlot.iife.min.js" "$there/uPlot.js"
cp "$work/package/dist/uPlot.min.css" "$there/uPlot.css"
cp "$work/package/LICENSE" "$there/uPlot.LICENSE"
echo "uPlot $VERSION is in $there"
