// The client of `schedc lsp`, and the picture of a program beside its text.

const { execFile } = require("node:child_process");
const { mkdtemp, readFile, rm } = require("node:fs/promises");
const { tmpdir } = require("node:os");
const { join } = require("node:path");
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

/** @type {LanguageClient | undefined} */
let client;
/** The pictures that are open, by the address of their program. */
const panels = new Map();

function settings() {
  return vscode.workspace.getConfiguration("schedlang");
}

async function start() {
  const { params, limit } = settings();
  client = new LanguageClient(
    "schedlang",
    "schedlang",
    { command: settings().get("command"), args: ["lsp"] },
    {
      documentSelector: [{ language: "sched" }],
      initializationOptions: { params, limit, viewCommand: "schedlang.view" },
      synchronize: { configurationSection: "schedlang" },
    },
  );
  await client.start();
}

/** Draw a program beside its text; again at each save, until the picture is closed. */
async function view(address) {
  const uri = address ? vscode.Uri.parse(address) : vscode.window.activeTextEditor?.document.uri;
  if (!uri) {
    return;
  }
  const document = await vscode.workspace.openTextDocument(uri);
  // What is drawn is the file, so that its imports are found.
  await document.save();
  const known = panels.get(uri.toString());
  const panel =
    known ??
    vscode.window.createWebviewPanel(
      "schedlang.view",
      uri.path.split("/").pop(),
      { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true },
      { enableScripts: true, retainContextWhenHidden: true },
    );
  if (!known) {
    panels.set(uri.toString(), panel);
    panel.onDidDispose(() => panels.delete(uri.toString()));
  }
  await draw(uri, panel);
}

async function draw(uri, panel) {
  const folder = await mkdtemp(join(tmpdir(), "schedlang-"));
  try {
    const page = join(folder, "page.html");
    const params = await paramsOf(uri);
    await schedc(["view", uri.fsPath, "-o", page, ...params]);
    panel.webview.html = await readFile(page, "utf8");
  } catch (error) {
    // The server says it at its place.
    vscode.window.setStatusBarMessage(`schedc view: ${String(error.message).split("\n")[0]}`, 5000);
  } finally {
    await rm(folder, { recursive: true });
  }
}

/** The options for those parameters of the settings that a program has. */
async function paramsOf(uri) {
  const text = (await vscode.workspace.openTextDocument(uri)).getText();
  return Object.entries(settings().get("params") ?? {})
    .filter(([name]) => new RegExp(`\\bparam\\s+${name}\\b`).test(text))
    .flatMap(([name, value]) => ["-p", `${name}=${value}`]);
}

function schedc(args) {
  return new Promise((resolve, reject) => {
    execFile(settings().get("command"), args, { timeout: 60_000 }, (error, stdout, stderr) =>
      error ? reject(new Error(stderr || error.message)) : resolve(stdout),
    );
  });
}

exports.activate = async (context) => {
  context.subscriptions.push(
    vscode.commands.registerCommand("schedlang.view", view),
    vscode.commands.registerCommand("schedlang.restart", async () => {
      await client?.dispose();
      await start();
    }),
    // Until it is saved, and drawn again, the picture is of an earlier text.
    vscode.workspace.onDidChangeTextDocument(({ document }) =>
      panels.get(document.uri.toString())?.webview.postMessage({ outdate: "of an earlier text" }),
    ),
    vscode.workspace.onDidSaveTextDocument((document) => {
      const panel = panels.get(document.uri.toString());
      return panel && draw(document.uri, panel);
    }),
  );
  try {
    await start();
  } catch (error) {
    vscode.window.showErrorMessage(
      `schedlang: ${error.message}. Is \`schedc\` installed, with the extra \`lsp\`? ` +
        "The setting `schedlang.command` names it.",
    );
  }
};

exports.deactivate = () => client?.dispose();
