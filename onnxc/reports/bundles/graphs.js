// Drawing (Cytoscape.js) and layered layout (d3-dag, without its solvers of linear programs) of graphs.
import cytoscape from "cytoscape";
import {
  coordGreedy, decrossTwoLayer, graphConnect, graphStratify, layeringLongestPath, sugiyama, twolayerAgg, twolayerGreedy,
} from "d3-dag";

const decrossing = () => decrossTwoLayer().order(twolayerGreedy().base(twolayerAgg()));

export { coordGreedy, cytoscape, decrossing, graphConnect, graphStratify, layeringLongestPath, sugiyama };
