// Tables that sort and filter, and draw only the rows in view; the bundler leaves out the modules not named here.
import {
  FilterModule, FormatModule, InteractionModule, ResizeTableModule, SelectRowModule, SortModule, Tabulator, TooltipModule,
} from "tabulator-tables";

Tabulator.registerModule([
  FilterModule, FormatModule, InteractionModule, ResizeTableModule, SelectRowModule, SortModule, TooltipModule,
]);

export { Tabulator };
