// llama.cpp through node-llama-cpp, for benchmarks/llm_peers.py: node llama_peer.mjs MODEL THREADS PROMPT OUTPUT ROUNDS
// Run in the folder where node-llama-cpp is installed. Prints one JSON array: a round each.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import path from "node:path";

const resolve = createRequire(path.join(process.cwd(), "here.js")).resolve;
const {getLlama} = await import(pathToFileURL(resolve("node-llama-cpp")));
const [modelPath, ...numbers] = process.argv.slice(2);
const [threads, prompt, output, rounds] = numbers.map(Number);

const llama = await getLlama({gpu: false, build: "never"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: prompt + output + 8, threads, batchSize: prompt});
const sequence = context.getSequence();
const found = [];
for (let round = 0; round < rounds; round++) {
    await sequence.clearHistory();
    const tokens = Array.from({length: prompt}, (_, i) => 1000 + (i * 7919 + round * 104729) % 40000);
    const started = performance.now();
    let first = 0, count = 0;
    for await (const _ of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        if (++count === 1) first = performance.now();
        if (count >= output) break;
    }
    const seconds = (performance.now() - first) / 1e3;
    found.push({ttft_ms: first - started, decode_tokens_per_s: (count - 1) / seconds});
}
console.log(JSON.stringify(found));
process.exit(0);
