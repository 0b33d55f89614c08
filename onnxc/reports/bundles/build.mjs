// Bundles the libraries that the HTML reports carry into onnxc/reports/assets/, with their licences and a list of
// versions and hashes. Run by `make assets`, after `npm ci`, which checks the hashes of package-lock.json.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "../assets");
const modules = join(here, "node_modules");
const bundles = ["graphs", "plots", "tables"];
const lock = JSON.parse(readFileSync(join(here, "package-lock.json"), "utf8"));

await build({
  absWorkingDir: here,
  entryPoints: bundles.map((name) => `${name}.js`),
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2020",
  charset: "ascii",
  legalComments: "none", // LICENSES.txt has them whole
  globalName: "vendored",
  outdir: assets,
});

// Each bundle has a name of its own, and nothing that would end the script element that it is put into.
for (const name of bundles) {
  const path = join(assets, `${name}.js`);
  const text = readFileSync(path, "utf8");
  if (!text.includes("var vendored=")) throw new Error(`${name}.js does not begin as expected`);
  if (text.includes("<!--")) throw new Error(`${name}.js cannot be put into a page`);
  writeFileSync(path, text.replace("var vendored=", `var ${name}=`).replace(/<\/(?=script)/gi, "<\\/"));
}
writeFileSync(
  join(assets, "tables.css"),
  readFileSync(join(modules, "tabulator-tables/dist/css/tabulator_simple.min.css"), "utf8").replace(/\/\*#.*\*\/\s*$/, ""),
);

// All that are installed for use: d3-dag comes with its own dependencies inside.
const packages = Object.entries(lock.packages)
  .filter(([path, about]) => path && !about.dev)
  .map(([path, { version, license, integrity }]) => ({ name: path.replace("node_modules/", ""), version, license, integrity }));
const licences = packages.map(({ name, version, license }) => {
  const folder = join(modules, name);
  const files = readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((file) => file.isFile() && /^(licen[cs]e|notice|copying)/i.test(file.name))
    .map((file) => join(file.parentPath ?? file.path, file.name))
    .sort();
  const texts = files.map((file) => readFileSync(file, "utf8").replaceAll("\r\n", "\n").trim());
  return [`${"=".repeat(100)}\n${name} ${version} (${license})\n${"=".repeat(100)}`, ...texts].join("\n\n");
});
writeFileSync(join(assets, "LICENSES.txt"), licences.join("\n\n\n") + "\n");

const hash = (file) => createHash("sha256").update(readFileSync(join(assets, file))).digest("hex");
const files = [...bundles.map((name) => `${name}.js`), "tables.css", "LICENSES.txt"];
const list = { packages, files: Object.fromEntries(files.map((file) => [file, hash(file)])) };
writeFileSync(join(assets, "vendored.json"), JSON.stringify(list, null, 2) + "\n");
console.log(files.map((file) => `${file} ${list.files[file].slice(0, 12)}`).join("\n"));
